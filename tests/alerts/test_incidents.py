"""Incidents: each is opened once and resolved once, and root causes group other causes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from ndif.alerts.causes import ROOTS, Cause, Findings, Key
from ndif.alerts.incidents import (
    Book,
    IncidentEvent,
    Notice,
    SavedBook,
    Timing,
    loaded,
    saved,
    step,
    taken_over,
)
from ndif.runtime.typed_json import from_json, to_json
from ndif.schema.server_state import ProblemKind as Kind

TIMING = Timing(hold_s=60, repeat_s=3600)
KEYS = [
    *(Key(kind, subject) for kind in (Kind.LOAD_FAILED, Kind.QUEUE_STUCK) for subject in "abc"),
    *(Key(kind, "x") for kind in (Kind.STORE_AWAY, Kind.NODE_LOST, Kind.DISK)),
]
LOOKS = st.lists(
    st.tuples(
        st.sampled_from([10.0, 10.0, 10.0, 70.0, 700.0]),
        st.sets(st.sampled_from(KEYS), max_size=4),
        st.sets(st.sampled_from(KEYS), max_size=2),
        st.booleans(),
    ),
    max_size=60,
)


def by_the_next(book: Book, now: float) -> Book:
    """Return the incidents that the next leader loads."""
    return loaded(from_json(SavedBook, to_json(saved(book))), now)


def causes(*keys: Key, at: float = 0.0) -> Findings:
    return Findings(tuple(Cause(*key, f"{key.subject} fails.", at) for key in keys))


def play(looks: list[tuple[float, Findings]], timing: Timing = TIMING) -> list[Notice]:
    book, sent_notices = Book(), []
    for now, findings in looks:
        book, notices = step(book, findings, now, timing)
        sent_notices += notices
    return sent_notices


@given(LOOKS)
def test_each_incident_is_opened_once_and_resolved_once(
    looks: list[tuple[float, set[Key], set[Key], bool]],
) -> None:
    book, now, ids = Book(), 0.0, count()
    sent_notices: list[tuple[float, Notice]] = []
    held: dict[Key, float] = {}
    quiet = [(70.0, set[Key](), set[Key](), False)] * 3
    for pause, holding, undecided, restarts in [*looks, *quiet]:
        now += pause
        if restarts:
            # The next leader loads the incidents that the previous leader saved.
            book = taken_over(Book(), by_the_next(book, now))
            held = {key: since for key, since in held.items() if key in holding}
            held = dict.fromkeys(held, now)
        findings = replace(
            causes(*sorted(holding), at=now), undecided=frozenset(undecided - holding)
        )
        held = {
            key: held.get(key, now) for key in {*holding, *(held.keys() & (undecided - holding))}
        }
        before = book
        book, notices = step(book, findings, now, TIMING, lambda: str(next(ids)))
        sent_notices += [(now, notice) for notice in notices]
        # No two open incidents share a kind or a cause.
        assert len({incident.kind for incident in book.open}) == len(book.open)
        keys = [key for incident in book.open for key in incident.holding]
        assert len(set(keys)) == len(keys)
        assert not set(keys) & book.pending.keys()
        known_keys = {m.cause.key for incident in book.open for m in incident.members}
        # A cause that held long enough is in an incident; an opened incident has only current causes.
        for key in holding:
            assert now - held[key] < TIMING.hold_s or key in known_keys
        for notice in notices:
            if notice.event is IncidentEvent.OPENED:
                new = {m.cause.key for m in notice.incident.members}
                assert new <= holding
                assert any(now - held[key] >= TIMING.hold_s for key in new)
            if notice.event is IncidentEvent.RESOLVED:
                assert not notice.incident.holding
                assert not holding & {m.cause.key for m in notice.incident.members}
        if not notices:
            assert {incident.id for incident in book.open} == {
                incident.id for incident in before.open
            }
    assert not book.open
    for incident in {notice.incident.id for _, notice in sent_notices}:
        mine = [(at, notice) for at, notice in sent_notices if notice.incident.id == incident]
        events = [notice.event for _, notice in mine]
        assert events[0] is IncidentEvent.OPENED
        assert events[-1] is IncidentEvent.RESOLVED
        assert Counter(events)[IncidentEvent.OPENED] == Counter(events)[IncidentEvent.RESOLVED] == 1
        for (earlier, earlier_notice), (later, other) in pairwise(mine):
            if other.event is IncidentEvent.REPEATED:
                assert later - earlier >= TIMING.repeat_s
            if other.event is IncidentEvent.CHANGED:
                assert later - earlier >= 600
                assert earlier_notice.incident.holding != other.incident.holding


def test_short_cause_opens_no_incident() -> None:
    failing = causes(KEYS[0])
    looks = [(at, failing if at % 60 < 50 else Findings(())) for at in range(0, 600, 10)]
    assert play(looks) == []


def test_short_absence_of_cause_does_not_resolve_incident() -> None:
    failing = causes(KEYS[0])
    looks = [
        (at, failing if at < 100 or at % 60 < 10 else Findings(())) for at in range(0, 900, 10)
    ]
    assert [notice.event for notice in play(looks)] == [IncidentEvent.OPENED]


def test_model_failures_during_store_outage_are_one_incident() -> None:
    store = Key(Kind.STORE_AWAY, "objects")
    models = [Key(Kind.LOAD_FAILED, f"org/model-{number}") for number in range(10)]
    looks = []
    for at in range(0, 400, 10):
        holding = [*models[: at // 5], *([store] if at >= 20 else [])] if at < 200 else []
        looks.append((float(at), causes(*holding)))
    opened, resolved = play(looks)
    assert (opened.event, resolved.event) == (IncidentEvent.OPENED, IncidentEvent.RESOLVED)
    assert opened.incident.kind is Kind.STORE_AWAY
    assert opened.incident.holding == {store, *models}


def test_ten_models_of_lost_node_are_one_incident() -> None:
    machine = Key(Kind.NODE_LOST, "gpu-1")
    models = [Key(Kind.NO_REPLICA, f"org/model-{number}") for number in range(10)]
    (opened,) = play([(at * 10.0, causes(machine, *models)) for at in range(10)])
    assert opened.incident.kind is Kind.NODE_LOST
    assert len(opened.incident.members) == 11


def test_remaining_failure_keeps_incident_open_after_root_cause_ends() -> None:
    store, model = Key(Kind.STORE_AWAY, "objects"), Key(Kind.LOAD_FAILED, "org/a")
    other = Key(Kind.LOAD_FAILED, "org/b")
    looks = [(at, causes(store, model)) for at in range(0, 100, 10)]
    looks += [(at, causes(model)) for at in range(100, 1000, 10)]
    # A model that fails later opens an incident of its own.
    looks += [(at, causes(model, other)) for at in range(1000, 1100, 10)]
    notices = play([(float(at), findings) for at, findings in looks])
    kinds = [(notice.event, notice.incident.kind) for notice in notices]
    assert kinds == [
        (IncidentEvent.OPENED, Kind.STORE_AWAY),
        (IncidentEvent.CHANGED, Kind.STORE_AWAY),
        (IncidentEvent.OPENED, Kind.LOAD_FAILED),
    ]
    assert notices[1].incident.holding == {model}


def test_changes_of_incident_are_reported_at_most_every_ten_minutes() -> None:
    looks = []
    for at in range(0, 3600, 10):
        keys = [Key(Kind.LOAD_FAILED, f"org/model-{number}") for number in range(1 + at // 60)]
        looks.append((float(at), causes(*keys)))
    events = [notice.event for notice in play(looks)]
    assert events == [IncidentEvent.OPENED, *[IncidentEvent.CHANGED] * 5]


def test_open_incident_is_repeated() -> None:
    notices = play([(float(at), causes(KEYS[0])) for at in range(0, 8000, 10)])
    assert [notice.event for notice in notices] == [
        IncidentEvent.OPENED,
        IncidentEvent.REPEATED,
        IncidentEvent.REPEATED,
    ]


def test_next_leader_resolves_incident_of_previous_leader() -> None:
    book, (opened,) = Book(), [*play([(at * 10.0, causes(KEYS[0])) for at in range(7)])]
    for at in range(7):
        book, _ = step(book, causes(KEYS[0]), at * 10.0, TIMING)
    book = taken_over(Book(), by_the_next(book, 500.0))
    # The first look of the next leader may precede the loading of models and resolves nothing.
    book, notices = step(book, Findings(()), 500.0, TIMING)
    assert notices == []
    book, (resolved,) = step(book, Findings(()), 560.0, TIMING)
    assert (resolved.event, resolved.incident.opened) == (
        IncidentEvent.RESOLVED,
        opened.incident.opened,
    )
    # The incident is forgotten a day later.
    assert book.over == (resolved.incident,)
    assert step(book, Findings(()), 560.0 + 24 * 3600, TIMING)[0].over == ()


def test_only_root_causes_group_other_causes() -> None:
    disk, model = Key(Kind.DISK, "results"), Key(Kind.LOAD_FAILED, "org/a")
    notices = play([(at * 10.0, causes(disk, model)) for at in range(10)])
    assert [notice.incident.kind for notice in notices] == [Kind.DISK, Kind.LOAD_FAILED]
    assert Kind.DISK not in ROOTS
