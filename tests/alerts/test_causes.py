"""Causes of alerts: each kind is found only in states that have it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndif.alerts.causes import Findings, Increases, Key, nodes_seen
from ndif.alerts.incidents import Book, IncidentEvent, Timing, step
from ndif.alerts.messages import ABOUT
from ndif.schema.answer import from_plain
from ndif.schema.server_state import Problem, ServerState
from ndif.schema.server_state import ProblemKind as Kind
from tests.alerts.states import NOW, findings_of, increases, status, waits

MODEL = "openai-community/gpt2"
SUBJECT = f"{MODEL} (nnsight 0.8)"


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = status()
    change(document)
    return document


def model(**fields: Any) -> dict[str, Any]:
    return changed(lambda document: document["models"][0].update(fields))


def replica(state: str) -> dict[str, Any]:
    return changed(lambda document: document["models"][0]["replicas"][0].update(state=state))


def probe(**changes: Any) -> dict[str, Any]:
    """The probes of a model whose last probe returned a wrong value."""
    return {
        "outcome": "wrong",
        "reason": "It is not finite.",
        "at": NOW - 5,
        "seconds": 0.3,
        "up": False,
        "up_share": 0.5,
        "probes": 2,
        **changes,
    }


def unloadable(**fields: Any) -> Findings:
    """The findings about a server whose only model could not be loaded."""
    text = "It has no files."
    document = model(replicas=[], processor="NOT DEPLOYED", problem=text, **fields)
    return findings_of(document, [Problem(Kind.LOAD_FAILED, SUBJECT, text)])


WITHDRAWN = Problem(
    Kind.GPU_WITHDRAWN,
    "GPU 0 of gpu-1",
    "GPU 0 of gpu-1 (GPU-5c3b) takes no model until 10:00: replicas on it ended.",
)
PROBLEM = Problem(Kind.PROBLEM, "plan.ics", "The calendar cannot be read: 404.")
WRONG: dict[Kind, tuple[str, Callable[[], Findings]]] = {
    Kind.STORE_AWAY: (
        "broker",
        lambda: findings_of(stores={"broker": False, "objects": True, "accounts": True}),
    ),
    Kind.NODE_LOST: ("gpu-2", lambda: findings_of(nodes={"gpu-1": NOW, "gpu-2": NOW - 60})),
    Kind.GPU_WITHDRAWN: ("GPU 0 of gpu-1", lambda: findings_of(problems=[WITHDRAWN])),
    Kind.DISK: ("results", lambda: findings_of(disk=(9, 100))),
    Kind.NO_REPLICA: (SUBJECT, lambda: findings_of(model(replicas=[], processor="NOT DEPLOYED"))),
    Kind.UNHEALTHY: (SUBJECT, lambda: findings_of(replica("UNHEALTHY"))),
    Kind.LOAD_FAILED: (SUBJECT, unloadable),
    Kind.REPLICAS_LOST: (MODEL, lambda: findings_of(counts=increases(lost={MODEL: 3}))),
    Kind.PROBE: (SUBJECT, lambda: findings_of(model(probe=probe()))),
    Kind.QUEUE_STUCK: (SUBJECT, lambda: findings_of(waits=waits(waiting=2, oldest=NOW - 301))),
    Kind.ERROR_RATE: (
        MODEL,
        lambda: findings_of(counts=increases(ended={MODEL: 10}, failed={MODEL: 6})),
    ),
    Kind.EVICTIONS: (MODEL, lambda: findings_of(counts=increases(evicted={MODEL: 11}))),
    Kind.PROBLEM: ("plan.ics", lambda: findings_of(problems=[PROBLEM])),
}


def test_healthy_server_has_no_causes() -> None:
    assert findings_of() == Findings(())
    assert WRONG.keys() == {*Kind} == ABOUT.keys()


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: str(kind.value))
def test_each_kind_opens_and_resolves_incident(kind: Kind) -> None:
    subject, look = WRONG[kind]
    findings = look()
    (cause,) = findings.causes
    assert cause.key == (kind, subject)
    assert cause.sentence.endswith(".")
    book, sent_notices = Book(), []
    for second in range(0, 300, 10):
        holds = second <= 120
        book, notices = step(book, findings if holds else findings_of(), NOW + second, Timing())
        sent_notices += [(notice.event, second) for notice in notices]
    assert sent_notices == [(IncidentEvent.OPENED, 60), (IncidentEvent.RESOLVED, 180)]
    assert not book.open


@pytest.mark.parametrize(
    "well",
    [
        lambda: findings_of(stores={"broker": True}),
        lambda: findings_of(nodes={"gpu-1": NOW, "gpu-2": NOW - 25 * 3600}),
        lambda: findings_of(disk=(13, 100)),
        lambda: findings_of(model(replicas=[], dedicated=False)),
        lambda: findings_of(model(replicas=[], desired_replicas=0)),
        lambda: findings_of(counts=increases(lost={MODEL: 2})),
        lambda: findings_of(counts=increases(over_s=1000, lost={MODEL: 9})),
        lambda: findings_of(waits=waits(waiting=2, oldest=NOW - 299)),
        # A long queue that moves.
        lambda: findings_of(
            waits=waits(waiting=2, oldest=NOW - 9000), counts=increases(ended={MODEL: 1})
        ),
        lambda: findings_of(waits=waits(waiting=2, oldest=NOW - 9000, last_dispatched=NOW - 99)),
        lambda: findings_of(counts=increases(ended={MODEL: 9}, failed={MODEL: 9})),
        lambda: findings_of(counts=increases(ended={MODEL: 10}, failed={MODEL: 5})),
        lambda: findings_of(counts=increases(over_s=1000, ended={MODEL: 10}, failed={MODEL: 10})),
        lambda: findings_of(counts=increases(evicted={MODEL: 10})),
        lambda: findings_of(model(probe=probe(outcome="ok", reason=None, up=True))),
        lambda: findings_of(model(probe=probe(outcome="loading", up=None))),
    ],
)
def test_values_within_limits_are_not_causes(well: Callable[[], Findings]) -> None:
    assert well() == Findings(())


def test_failed_probe_is_one_cause_and_stays_undecided_while_model_reloads() -> None:
    (cause,) = findings_of(model(probe=probe())).causes
    assert cause.since == NOW - 5
    assert cause.sentence == f"The probe of {SUBJECT} failed (wrong): It is not finite."
    # A more specific cause replaces the failed probe: the model could not be loaded.
    failure = unloadable(probe=probe())
    assert [cause.kind for cause in failure.causes] == [Kind.LOAD_FAILED]
    loading = findings_of(model(probe=probe(outcome="loading")))
    assert loading == Findings((), frozenset({Key(Kind.PROBE, SUBJECT)}))


def test_queue_is_stuck_after_half_an_hour_without_dispatch() -> None:
    queue = waits(waiting=1, oldest=NOW - 9000, last_dispatched=NOW - 1801)
    (cause,) = findings_of(waits=queue).causes
    assert (cause.kind, cause.since) == (Kind.QUEUE_STUCK, NOW - 1801)
    assert cause.sentence == f"1 job waits for {SUBJECT} behind others that do not end."


def test_causes_of_reloading_model_are_undecided() -> None:
    document = replica("DEPLOYING")
    findings = findings_of(document, waits=waits(waiting=2, oldest=NOW - 9000))
    assert findings.causes == ()
    kinds = (Kind.LOAD_FAILED, Kind.NO_REPLICA, Kind.PROBE, Kind.QUEUE_STUCK)
    assert findings.undecided == {Key(kind, SUBJECT) for kind in kinds}


def test_disk_near_limit_is_undecided() -> None:
    assert (
        findings_of(disk=(11, 100)).undecided
        == findings_of(disk=None).undecided
        == {(Kind.DISK, "results")}
    )


def test_problem_keeps_key_when_numbers_in_text_change() -> None:
    def problems(*texts: str) -> Findings:
        return findings_of(problems=[Problem(Kind.PROBLEM, "It", text) for text in texts])

    first, second = problems("It took 3.5 s."), problems("It took 4 s.", "It took 9 s.")
    assert {cause.key for cause in first.causes} == {cause.key for cause in second.causes}


def test_lost_node_is_forgotten_after_a_day() -> None:
    nodes = nodes_seen(
        {"gone": NOW - 10, "forgotten": NOW - 25 * 3600}, from_plain(ServerState, status()), NOW
    )
    assert nodes == {"gone": NOW - 10, "gpu-1": NOW}


def test_increases_count_only_their_window() -> None:
    from ndif.alerts.causes import Counts

    counts = Increases()
    for minute in range(61):
        counts.record(minute * 60.0, Counts({"a": float(minute)}))
    assert counts.within(300).ended == {"a": 5}
    assert counts.within(1800).ended == {"a": 30}
    # Samples older than every window are dropped.
    assert len(counts.samples) < 35
    assert Increases().within(300).ended == {}


def test_monitoring_document_lists_each_kind_with_severity() -> None:
    text = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (critical|warning) \|", text, re.MULTILINE)
    assert dict(rows) == {kind.value: about.severity for kind, about in ABOUT.items()}
