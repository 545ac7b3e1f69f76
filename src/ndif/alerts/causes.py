"""The causes of alerts that a server's state shows: a pure function of plain documents and counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ndif.config.units import format_duration
from ndif.schema.model_key import ModelKey
from ndif.sizes import format_size

ERRORS_WITHIN_S = 900.0
"""Window of the error rate: long enough that ten jobs of a quiet model are in it."""
_LEAST_JOBS = 10
"""Jobs below which an error rate says nothing: one user's mistakes in a notebook are a few."""
LOST_WITHIN_S = 900.0
_MOST_LOST = 3
"""Lost processes of one model within that window; a single one is replaced, and its job tried again."""
EVICTIONS_WITHIN_S = 1800.0
_MOST_EVICTIONS = 10
"""Evictions of one model within that window: it then serves for less than three minutes at a time."""
_BLOCKED_S = 1800.0
"""Seconds without a dispatch while jobs run: they may be long, so that this takes longer to be a cause."""
_NODE_S = 24 * 3600.0
"""Seconds for which a machine that went away is missed; later an operator has taken it out."""
_ENOUGH_MORE = 0.02
"""Part of a disk that must be free beyond the limit before it counts as enough, so that nothing flaps."""
_MAX_QUOTED = 500
"""Characters of another's sentence that a cause repeats."""
_DISK_PROBLEM = "The disk of "
_NUMBER = re.compile(r"\d[\d.,:]*")


class Kind(str, Enum):
    """Kinds of causes."""

    STORE_AWAY = "store-away"
    NODE_LOST = "node-lost"
    GPU_WITHDRAWN = "gpu-withdrawn"
    DISK = "disk"
    NO_REPLICA = "no-replica"
    UNHEALTHY = "unhealthy"
    LOAD_FAILED = "load-failed"
    REPLICAS_LOST = "replicas-lost"
    PROBE = "probe"
    QUEUE_STUCK = "queue-stuck"
    ERROR_RATE = "error-rate"
    EVICTIONS = "evictions"
    PROBLEM = "problem"


ROOTS = frozenset((Kind.STORE_AWAY, Kind.NODE_LOST, Kind.GPU_WITHDRAWN))
"""Kinds that make models fail, so that what fails meanwhile is told with them."""
FOLLOWING = frozenset(
    (
        *(Kind.NO_REPLICA, Kind.UNHEALTHY, Kind.LOAD_FAILED, Kind.REPLICAS_LOST),
        *(Kind.QUEUE_STUCK, Kind.ERROR_RATE, Kind.PROBE),
    )
)
"""Kinds that may follow from one of `ROOTS`."""


class Key(NamedTuple):
    """Identity of a cause: of one kind and subject there is one."""

    kind: Kind
    subject: str
    """The model, machine, GPU or store that it is about."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that is wrong."""

    kind: Kind
    subject: str
    sentence: str
    since: float
    """Unix time from which it is known to hold."""

    @property
    def key(self) -> Key:
        """Return the cause's identity."""
        return Key(self.kind, self.subject)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that an operator sets."""

    queue_s: float = 300.0
    """Seconds in which jobs wait and none is dispatched."""
    error_rate: float = 0.5
    """Fraction of a model's jobs that fail."""
    disk_free: float = 0.1
    """Fraction of the disk that should be free."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Events by model, since the process began to count."""

    ended: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, float] = field(default_factory=dict)
    """Jobs among those that have ended and did not complete."""
    lost: Mapping[str, float] = field(default_factory=dict)
    """Replicas whose process ended by itself."""
    evicted: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Increases:
    """Counts of some time ago, from which follows how many events there were since."""

    samples: list[tuple[float, Counts]] = field(default_factory=list)
    """Times and counts, the oldest first."""

    def note(self, at: float, counts: Counts) -> None:
        """Add the counts of a moment, and drop those older than any window."""
        longest = max(ERRORS_WITHIN_S, LOST_WITHIN_S, EVICTIONS_WITHIN_S)
        self.samples.append((at, counts))
        while len(self.samples) > 2 and self.samples[1][0] <= at - longest:
            del self.samples[0]

    def within(self, seconds: float) -> Counts:
        """Return the events of the last seconds, or of all the time that is known if that is less."""
        if not self.samples:
            return Counts()
        now, last = self.samples[-1]
        earlier = [counts for at, counts in self.samples if at <= now - seconds]
        first = earlier[-1] if earlier else self.samples[0][1]
        names = ("ended", "failed", "lost", "evicted")
        return Counts(*(_difference(getattr(last, name), getattr(first, name)) for name in names))


def _difference(last: Mapping[str, float], first: Mapping[str, float]) -> Mapping[str, float]:
    return {name: value - first.get(name, 0.0) for name, value in last.items()}


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a server at one moment."""

    at: float
    status: Mapping[str, Any]
    """Answer of `GET /admin/status`."""
    waits: Sequence[Mapping[str, Any]]
    """Answer of `ndif.control.status.describe_waits`."""
    stores: Mapping[str, bool]
    """Names of the stores, and which of them answer."""
    disk: tuple[int, int] | None
    """Bytes of the disk of results that are free, and all; None while it does not tell."""
    nodes: Mapping[str, float]
    """Machines that were there, and when each was seen last."""
    counts: Increases


@dataclass(frozen=True, slots=True)
class Findings:
    """The causes that hold, and those of which nothing can be said now."""

    causes: tuple[Cause, ...]
    undecided: frozenset[Key] = frozenset()
    """Causes that neither hold nor are over, as of a model that is being loaded again."""


def find(seen: Observation, limits: Limits) -> Findings:
    """Return the causes that a server's state shows."""
    undecided: set[Key] = set()
    causes = [
        *_stores(seen),
        *_nodes(seen),
        *_gpus(seen),
        *_disk(seen, limits, undecided),
        *_models(seen, undecided),
        *_queues(seen, limits, undecided),
        *_counted(seen, limits),
        *_problems(seen),
    ]
    # Of two sentences about one subject the first is told.
    by_key = {each.key: each for each in reversed(causes)}
    return Findings(tuple(reversed(by_key.values())), frozenset(undecided - by_key.keys()))


def nodes_seen(
    nodes: Mapping[str, float], status: Mapping[str, Any], at: float
) -> dict[str, float]:
    """Return the machines that are there or were lately, and when each was seen last."""
    lately = {name: seen for name, seen in nodes.items() if at - seen < _NODE_S}
    return lately | {str(node["name"]): at for node in status["nodes"]}


_AWAY = {
    "broker": "The broker does not answer: jobs are refused, and those that run go on.",
    "objects": "The object store does not answer: polled jobs and large results are refused.",
    "accounts": "The store of API keys does not answer: only keys used a moment ago are let in.",
}


def _stores(seen: Observation) -> Iterator[Cause]:
    for store, does_answer in seen.stores.items():
        if not does_answer:
            yield Cause(Kind.STORE_AWAY, store, _AWAY[store], seen.at)


def _nodes(seen: Observation) -> Iterator[Cause]:
    there = {node["name"] for node in seen.status["nodes"]}
    for name, last in seen.nodes.items():
        if name not in there and seen.at - last < _NODE_S:
            yield Cause(Kind.NODE_LOST, name, f"The machine {name} is no longer there.", last)


def _gpus(seen: Observation) -> Iterator[Cause]:
    for node in seen.status["nodes"]:
        for index, gpu in enumerate(node["gpus"]):
            if gpu["withdrawn"]:
                subject = _gpu(node, index)
                said = f"{subject} takes no models, because replicas failed on it."
                sentences = [p for p in seen.status["problems"] if p.startswith(f"{subject} ")]
                yield Cause(Kind.GPU_WITHDRAWN, subject, _quoted([*sentences, said][0]), seen.at)


def _gpu(node: Mapping[str, Any], index: int) -> str:
    return f"GPU {index} of {node['name']}"


def _disk(seen: Observation, limits: Limits, undecided: set[Key]) -> Iterator[Cause]:
    key = Key(Kind.DISK, "results")
    if seen.disk is None:
        undecided.add(key)
        return
    free, total = seen.disk
    if free < total * limits.disk_free:
        of_it = f"{format_size(free)} of {format_size(total)}"
        said = f"{free / total:.0%} of the disk of results is free: {of_it}."
        yield Cause(*key, said, seen.at)
    elif free < total * (limits.disk_free + _ENOUGH_MORE):
        undecided.add(key)


def _models(seen: Observation, undecided: set[Key]) -> Iterator[Cause]:
    for model in seen.status["models"]:
        subject = _subject(model)
        states = [replica["state"] for replica in model["replicas"]]
        if "DEPLOYING" in states or model["processor"] in ("PROVISIONING", "DEPLOYING"):
            undecided |= {
                *(Key(Kind.LOAD_FAILED, subject), Key(Kind.NO_REPLICA, subject)),
                Key(Kind.PROBE, subject),
            }
        if count := states.count("UNHEALTHY"):
            said = f"{_replicas(count)} of {subject} {_do(count)} not answer."
            yield Cause(Kind.UNHEALTHY, subject, said, seen.at)
        if model["problem"]:
            yield Cause(Kind.LOAD_FAILED, subject, _quoted(model["problem"]), seen.at)
        elif (
            model["dedicated"]
            and model["desired_replicas"]
            and not {"RUNNING", "DEPLOYING", "UNHEALTHY"}.intersection(states)
            and model["processor"] not in ("PROVISIONING", "DEPLOYING")
        ):
            said = f"{subject} should have {_replicas(model['desired_replicas'])} and has none."
            yield Cause(Kind.NO_REPLICA, subject, said, seen.at)
        elif (probe := model["probe"]) and probe["up"] is False:
            yield from _probe(subject, probe, undecided)


def _probe(subject: str, probe: Mapping[str, Any], undecided: set[Key]) -> Iterator[Cause]:
    """Yield the failure of a model's last probe; one that could not be made since then decides nothing."""
    if probe["outcome"] in ("loading", "unsupported"):
        undecided.add(Key(Kind.PROBE, subject))
        return
    said = f"The probe of {subject} failed ({probe['outcome']}): {probe['reason'] or 'no reason is known.'}"
    yield Cause(Kind.PROBE, subject, _quoted(said), probe["at"])


def _queues(seen: Observation, limits: Limits, undecided: set[Key]) -> Iterator[Cause]:
    loading = {
        _subject(model)
        for model in seen.status["models"]
        if any(replica["state"] == "DEPLOYING" for replica in model["replicas"])
    }
    ended = seen.counts.within(limits.queue_s).ended
    for queue in seen.waits:
        subject = _subject(queue)
        if not queue["waiting"]:
            continue
        if subject in loading:
            undecided.add(Key(Kind.QUEUE_STUCK, subject))
            continue
        since = seen.at if queue["oldest"] is None else queue["oldest"]
        jobs = _jobs(queue["waiting"])
        if queue["running"]:
            since = max(since, queue["last_dispatched"])
            if seen.at - since >= max(_BLOCKED_S, limits.queue_s):
                said = f"{jobs} for {subject} behind others that do not end."
                yield Cause(Kind.QUEUE_STUCK, subject, said, since)
        elif seen.at - since >= limits.queue_s and not ended.get(_label(queue)):
            yield Cause(Kind.QUEUE_STUCK, subject, f"{jobs} for {subject}, and none runs.", since)


def _counted(seen: Observation, limits: Limits) -> Iterator[Cause]:
    jobs = seen.counts.within(ERRORS_WITHIN_S)
    for model, ended in jobs.ended.items():
        failed = jobs.failed.get(model, 0.0)
        if ended >= _LEAST_JOBS and failed > ended * limits.error_rate:
            said = (
                f"{failed:.0f} of {ended:.0f} jobs of {model} failed in the last "
                f"{format_duration(ERRORS_WITHIN_S)}."
            )
            yield Cause(Kind.ERROR_RATE, model, said, seen.at)
    for model, count in seen.counts.within(LOST_WITHIN_S).lost.items():
        if count >= _MOST_LOST:
            window = format_duration(LOST_WITHIN_S)
            said = f"{count:.0f} processes of {model} ended by themselves in the last {window}."
            yield Cause(Kind.REPLICAS_LOST, model, said, seen.at)
    for model, count in seen.counts.within(EVICTIONS_WITHIN_S).evicted.items():
        if count > _MOST_EVICTIONS:
            window = format_duration(EVICTIONS_WITHIN_S)
            said = f"{model} left its device {count:.0f} times in the last {window}."
            yield Cause(Kind.EVICTIONS, model, said, seen.at)


def _problems(seen: Observation) -> Iterator[Cause]:
    """Yield the problems that no other kind tells."""
    status = seen.status
    told = {model["problem"] for model in status["models"]}
    withdrawn = tuple(
        f"{_gpu(node, index)} "
        for node in status["nodes"]
        for index, gpu in enumerate(node["gpus"])
        if gpu["withdrawn"]
    )
    for problem in [*status["problems"], *status["schedule"]["problems"]]:
        if problem not in told and not problem.startswith((*withdrawn, _DISK_PROBLEM)):
            # A sentence whose numbers change, as a disk's, is one problem all the same.
            subject = _NUMBER.sub("#", problem)[:_MAX_QUOTED]
            yield Cause(Kind.PROBLEM, subject, _quoted(problem), seen.at)


def _subject(model: Mapping[str, Any]) -> str:
    """Return the name of a model of the documents of status and queue, and its generation."""
    generation = model["generation"]
    return f"{_label(model)} (nnsight {generation})" if generation else _label(model)


def _label(model: Mapping[str, Any]) -> str:
    return ModelKey.parse(model["model_key"]).label


def _quoted(sentence: str) -> str:
    return sentence if len(sentence) <= _MAX_QUOTED else f"{sentence[: _MAX_QUOTED - 1]}…"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _do(count: int) -> str:
    return "does" if count == 1 else "do"


def _jobs(count: int) -> str:
    return "1 job waits" if count == 1 else f"{count} jobs wait"
