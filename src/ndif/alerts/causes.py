"""The causes of alerts, found in a server's state and event counts by a pure function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ndif.config.units import format_duration
from ndif.schema.server_state import ModelState, Probe, Problem, QueueWait, ServerState, subject_of
from ndif.schema.server_state import ProblemKind as Kind
from ndif.schema.states import ProbeKind, ProcessorStatus
from ndif.sizes import format_size

ERRORS_WITHIN_S = 900.0
"""Window of the error rate: long enough for ten jobs of a quiet model."""
_MIN_JOBS = 10
"""Minimum jobs for an error rate: a few failures may be one user's mistakes in a notebook."""
LOST_WITHIN_S = 900.0
_MIN_LOST = 3
"""Minimum lost processes of one model in that window for an alert; a single one is replaced silently."""
EVICTIONS_WITHIN_S = 1800.0
_MAX_EVICTIONS = 10
"""Maximum evictions of one model in that window without an alert: one every three minutes."""
_BLOCKED_S = 1800.0
"""Minimum seconds since the last dispatch for a stuck queue, because the running jobs may be long."""
_MISSING_NODE_S = 24 * 3600.0
"""Seconds for which a missing node is a cause; after that, the node counts as removed by the operator."""
_DISK_HYSTERESIS = 0.02
"""Fraction of a disk that must be free beyond the limit before the cause ends, to avoid flapping."""
_MAX_QUOTED = 500
"""Maximum characters of a quoted sentence."""

ROOTS = frozenset((Kind.STORE_AWAY, Kind.NODE_LOST, Kind.GPU_WITHDRAWN))
"""Kinds that make models fail; the failures meanwhile are reported with them."""
FOLLOWING = frozenset(
    (
        *(Kind.NO_REPLICA, Kind.UNHEALTHY, Kind.LOAD_FAILED, Kind.REPLICAS_LOST),
        *(Kind.QUEUE_STUCK, Kind.ERROR_RATE, Kind.PROBE),
    )
)
"""Kinds that may follow from one of `ROOTS`."""


class Key(NamedTuple):
    """Identity of a cause: kind and subject together are unique."""

    kind: Kind
    subject: str
    """The affected model, node, GPU or store."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A condition that the operator should know about."""

    kind: Kind
    subject: str
    sentence: str
    since: float
    """Unix time since which the cause is known to hold."""

    @property
    def key(self) -> Key:
        """Return the cause's identity."""
        return Key(self.kind, self.subject)


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """Limits that an operator sets."""

    queue_s: float = 300.0
    """Seconds for which jobs may wait while none is dispatched."""
    error_rate: float = 0.5
    """Fraction of a model's jobs that may fail."""
    disk_free: float = 0.1
    """Fraction of the disk that should be free."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Event counts by model, since the process began to count."""

    ended: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, float] = field(default_factory=dict)
    """Ended jobs that neither completed nor were cancelled."""
    lost: Mapping[str, float] = field(default_factory=dict)
    """Replicas whose process ended by itself."""
    evicted: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Increases:
    """Samples of cumulative counts, for the increase over a window."""

    samples: list[tuple[float, Counts]] = field(default_factory=list)
    """Times and counts, the oldest first."""

    def record(self, at: float, counts: Counts) -> None:
        """Add the counts of a moment, and drop those older than any window."""
        longest = max(ERRORS_WITHIN_S, LOST_WITHIN_S, EVICTIONS_WITHIN_S)
        self.samples.append((at, counts))
        while len(self.samples) > 2 and self.samples[1][0] <= at - longest:
            del self.samples[0]

    def within(self, seconds: float) -> Counts:
        """Return the events of the last `seconds`, or of all samples if they cover less."""
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
class ServerObservation:
    """The state of a server at one moment."""

    at: float
    server: ServerState
    problems: Sequence[Problem]
    waits: Sequence[QueueWait]
    stores: Mapping[str, bool]
    """True for each store that answers, by name."""
    disk: tuple[int, int] | None
    """Free and total bytes of the disk of results; None if unknown."""
    nodes: Mapping[str, float]
    """Unix time at which each node was last seen."""
    counts: Increases


@dataclass(frozen=True, slots=True)
class Findings:
    """The causes that hold, and the keys of undecided causes."""

    causes: tuple[Cause, ...]
    undecided: frozenset[Key] = frozenset()
    """Keys of causes that may or may not hold, such as failures of a model that is loading again."""


def find(observation: ServerObservation, limits: AlertLimits) -> Findings:
    """Return the causes that a server's state shows."""
    undecided: set[Key] = set()
    causes = [
        *_stores(observation),
        *_nodes(observation),
        *_disk(observation, limits, undecided),
        *(
            Cause(problem.kind, problem.subject, _quoted(problem.text), observation.at)
            for problem in observation.problems
        ),
        *_models(observation, undecided),
        *_queues(observation, limits, undecided),
        *_counted(observation, limits),
    ]
    # The first of several causes with the same key is kept.
    by_key = {cause.key: cause for cause in reversed(causes)}
    return Findings(tuple(reversed(by_key.values())), frozenset(undecided - by_key.keys()))


def nodes_seen(nodes: Mapping[str, float], server: ServerState, at: float) -> dict[str, float]:
    """Return the time at which each node was last seen; leave out nodes missing for a day."""
    lately = {name: last for name, last in nodes.items() if at - last < _MISSING_NODE_S}
    return lately | {node.name: at for node in server.nodes}


_UNAVAILABLE = {
    "broker": "The broker does not answer: new jobs are refused, and running jobs continue.",
    "objects": "The object store does not answer: polled jobs and large results are refused.",
    "accounts": "The store of API keys does not answer: only recently used keys are accepted.",
}


def _stores(observation: ServerObservation) -> Iterator[Cause]:
    for store, does_answer in observation.stores.items():
        if not does_answer:
            yield Cause(Kind.STORE_AWAY, store, _UNAVAILABLE[store], observation.at)


def _nodes(observation: ServerObservation) -> Iterator[Cause]:
    present = {node.name for node in observation.server.nodes}
    for name, last in observation.nodes.items():
        if name not in present and observation.at - last < _MISSING_NODE_S:
            yield Cause(Kind.NODE_LOST, name, f"The node {name} is gone.", last)


def _disk(
    observation: ServerObservation, limits: AlertLimits, undecided: set[Key]
) -> Iterator[Cause]:
    key = Key(Kind.DISK, "results")
    if observation.disk is None:
        undecided.add(key)
        return
    free, total = observation.disk
    if free < total * limits.disk_free:
        amount = f"{format_size(free)} of {format_size(total)}"
        sentence = f"{free / total:.0%} of the disk of results is free: {amount}."
        yield Cause(*key, sentence, observation.at)
    elif free < total * (limits.disk_free + _DISK_HYSTERESIS):
        undecided.add(key)


def _models(observation: ServerObservation, undecided: set[Key]) -> Iterator[Cause]:
    for model in observation.server.models:
        subject = model.subject
        states = [replica.state for replica in model.replicas]
        is_coming = model.processor in (ProcessorStatus.PROVISIONING, ProcessorStatus.DEPLOYING)
        if _is_loading(model) or is_coming:
            kinds = (Kind.LOAD_FAILED, Kind.NO_REPLICA, Kind.PROBE)
            undecided |= {Key(kind, subject) for kind in kinds}
        if count := states.count("UNHEALTHY"):
            sentence = f"{_replicas(count)} of {subject} {_do(count)} not answer."
            yield Cause(Kind.UNHEALTHY, subject, sentence, observation.at)
        if model.problem:
            continue  # `observation.problems` reports it
        if (
            model.dedicated
            and model.desired_replicas
            and not {"RUNNING", "DEPLOYING", "UNHEALTHY"}.intersection(states)
            and not is_coming
        ):
            sentence = f"{subject} should have {_replicas(model.desired_replicas)} and has none."
            yield Cause(Kind.NO_REPLICA, subject, sentence, observation.at)
        elif (probe := model.probe) and probe.up is False:
            yield from _failed_probe(subject, probe, undecided)


def _is_loading(model: ModelState) -> bool:
    return any(replica.state == "DEPLOYING" for replica in model.replicas)


def _failed_probe(subject: str, probe: Probe, undecided: set[Key]) -> Iterator[Cause]:
    """Yield the cause of a failed probe; a probe that had no result adds its cause to `undecided`."""
    if probe.outcome in (ProbeKind.LOADING, ProbeKind.UNSUPPORTED):
        undecided.add(Key(Kind.PROBE, subject))
        return
    why = probe.reason or "the reason is unknown."
    sentence = f"The probe of {subject} failed ({probe.outcome.value}): {why}"
    yield Cause(Kind.PROBE, subject, _quoted(sentence), probe.at)


def _queues(
    observation: ServerObservation, limits: AlertLimits, undecided: set[Key]
) -> Iterator[Cause]:
    loading = {model.subject for model in observation.server.models if _is_loading(model)}
    ended = observation.counts.within(limits.queue_s).ended
    for queue in observation.waits:
        subject = subject_of(queue.label, queue.generation)
        if not queue.waiting:
            continue
        if subject in loading:
            undecided.add(Key(Kind.QUEUE_STUCK, subject))
            continue
        since = observation.at if queue.oldest is None else queue.oldest
        jobs = _jobs(queue.waiting)
        if queue.last_dispatched is not None:
            since = max(since, queue.last_dispatched)
            if observation.at - since >= max(_BLOCKED_S, limits.queue_s):
                sentence = f"{jobs} for {subject} behind others that do not end."
                yield Cause(Kind.QUEUE_STUCK, subject, sentence, since)
        elif observation.at - since >= limits.queue_s and not ended.get(queue.label):
            yield Cause(Kind.QUEUE_STUCK, subject, f"{jobs} for {subject}, and none runs.", since)


def _counted(observation: ServerObservation, limits: AlertLimits) -> Iterator[Cause]:
    jobs = observation.counts.within(ERRORS_WITHIN_S)
    for model, ended in jobs.ended.items():
        failed = jobs.failed.get(model, 0.0)
        if ended >= _MIN_JOBS and failed > ended * limits.error_rate:
            sentence = (
                f"{failed:.0f} of {ended:.0f} jobs of {model} failed in the last "
                f"{format_duration(ERRORS_WITHIN_S)}."
            )
            yield Cause(Kind.ERROR_RATE, model, sentence, observation.at)
    for model, count in observation.counts.within(LOST_WITHIN_S).lost.items():
        if count >= _MIN_LOST:
            window = format_duration(LOST_WITHIN_S)
            sentence = f"{count:.0f} processes of {model} ended by themselves in the last {window}."
            yield Cause(Kind.REPLICAS_LOST, model, sentence, observation.at)
    for model, count in observation.counts.within(EVICTIONS_WITHIN_S).evicted.items():
        if count > _MAX_EVICTIONS:
            window = format_duration(EVICTIONS_WITHIN_S)
            sentence = f"{model} was evicted {count:.0f} times in the last {window}."
            yield Cause(Kind.EVICTIONS, model, sentence, observation.at)


def _quoted(sentence: str) -> str:
    return sentence if len(sentence) <= _MAX_QUOTED else f"{sentence[: _MAX_QUOTED - 1]}…"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _do(count: int) -> str:
    return "does" if count == 1 else "do"


def _jobs(count: int) -> str:
    return "1 job waits" if count == 1 else f"{count} jobs wait"
