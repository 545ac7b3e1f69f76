"""What a runner may say and when, how much of it, and what it may say that a run cost."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ndif.host.channel import ProtocolError
from ndif.host.dialogue import Dialogue, LimitError, Limits, UnheardError, meta_of
from ndif.runtime.frames import MAX_TEXT

FRAME = 256
"""What an empty streamed frame counts for."""

BEFORE = {"idle", "running"}
DURING = {"log", "stream", "await upload", "spill", "result", "error"}
SPILLING = {"spilled", "error"}
STATES = {"before": BEFORE, "during": DURING, "spilling": SPILLING}
PATHS: dict[str, list[str]] = {
    "before": [],
    "during": ["idle", "running"],
    "spilling": ["running", "log", "spill"],
}
STRANGE = ["", "run", "forked", "ready", "failed", "file", "upload", "Running", "running ", "\0"]
EVERY = sorted(BEFORE | DURING | SPILLING | set(STRANGE))


class Clock:
    """A time that passes when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_dialogue(
    *,
    log_bytes: int = 1 << 30,
    log_lines_per_s: float = 1e9,
    streamed_bytes: int = 1 << 30,
    clock: Clock | None = None,
    converses: bool = True,
    state: str = "during",
) -> Dialogue:
    limits = Limits(log_bytes, log_lines_per_s, streamed_bytes, frame_bytes=1000)
    dialogue = Dialogue(limits, converses=converses, clock=clock or Clock())
    for kind in PATHS[state]:
        dialogue.hear({"kind": kind}, b"")
    return dialogue


def log(dialogue: Dialogue, body: bytes = b"x") -> None:
    assert dialogue.hear({"kind": "log"}, body) == "log"


def stream(dialogue: Dialogue, body: bytes = b"") -> None:
    assert dialogue.hear({"kind": "stream"}, body) == "stream"


# Which may come when.


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", EVERY)
def test_each_kind_in_each_state(state: str, kind: str) -> None:
    dialogue = a_dialogue(state=state)
    if kind in STATES[state]:
        assert dialogue.hear({"kind": kind}, b"x") == kind
    else:
        with pytest.raises(ProtocolError, match="may not come here"):
            dialogue.hear({"kind": kind}, b"x")


@pytest.mark.parametrize("kind", ["stream", "await upload"])
def test_nothing_is_said_to_a_client_that_polls(kind: str) -> None:
    limits = Limits(1000, 1000, 1000, 1000)
    dialogue = Dialogue(limits, converses=True, listens=False, clock=Clock())
    assert dialogue.hear({"kind": "running"}, b"") == "running"
    assert dialogue.hear({"kind": "log"}, b"x") == "log"
    with pytest.raises(UnheardError, match="blocking=True"):
        dialogue.hear({"kind": kind}, b"")


@pytest.mark.parametrize(
    ("state", "kind"), [(state, kind) for state in STATES for kind in sorted(STATES[state])]
)
def test_where_each_kind_leads(state: str, kind: str) -> None:
    dialogue = a_dialogue(state=state)
    dialogue.hear({"kind": kind}, b"")
    after = {"running": DURING, "spill": SPILLING}.get(kind, STATES[state])
    for following in EVERY:
        trial = a_dialogue(state=state)
        trial.hear({"kind": kind}, b"")
        if following in after:
            trial.hear({"kind": following}, b"")
        else:
            with pytest.raises(ProtocolError):
                trial.hear({"kind": following}, b"")


def test_a_whole_conversation() -> None:
    dialogue = a_dialogue(state="before")
    kinds = [
        "idle", "running", "log", "stream", "await upload", "stream", "log", "spill", "spilled"
    ]  # fmt: skip
    assert [dialogue.hear({"kind": kind}, b"x") for kind in kinds] == kinds


def test_it_runs_once() -> None:
    dialogue = a_dialogue()
    with pytest.raises(ProtocolError, match="'running' may not come here"):
        dialogue.hear({"kind": "running"}, b"")


def test_it_hands_in_one_file() -> None:
    # Each would have another made for it.
    dialogue = a_dialogue(state="spilling")
    with pytest.raises(ProtocolError, match="'spill' may not come here"):
        dialogue.hear({"kind": "spill"}, b"")


def test_nothing_is_printed_or_streamed_while_a_file_is_written() -> None:
    for kind in ("log", "stream", "await upload", "result"):
        with pytest.raises(ProtocolError):
            a_dialogue(state="spilling").hear({"kind": kind}, b"")


def test_a_client_that_cannot_answer_is_asked_nothing() -> None:
    for kind in ("stream", "await upload"):
        with pytest.raises(ProtocolError, match="may not come here"):
            a_dialogue(converses=False).hear({"kind": kind}, b"")
    log(a_dialogue(converses=False))


def test_each_kind_has_room_for_what_it_carries() -> None:
    room = a_dialogue().room
    assert {room({"kind": kind}) for kind in ("result", "stream")} == {1000}
    assert {room({"kind": kind}) for kind in ("log", "error")} == {MAX_TEXT}
    others = set(EVERY) - {"result", "stream", "log", "error"}
    assert {room({"kind": kind}) for kind in others} == {0}


def test_what_is_refused_is_named_briefly() -> None:
    with pytest.raises(ProtocolError) as refused:
        a_dialogue().hear({"kind": "x" * 10_000}, b"")
    assert str(refused.value) == f"'{'x' * 20}' may not come here"


# How much is printed.


def test_logs_to_the_last_byte() -> None:
    dialogue = a_dialogue(log_bytes=10)
    log(dialogue, b"x" * 4)
    log(dialogue, b"x" * 6)
    log(dialogue, b"")
    with pytest.raises(LimitError, match=r"more than 10 bytes.*NDIF_MAX_LOG_BYTES"):
        log(dialogue)


def test_logs_do_not_become_fewer_with_time() -> None:
    clock = Clock()
    dialogue = a_dialogue(log_bytes=10, clock=clock)
    log(dialogue, b"x" * 10)
    clock.now += 1e6
    with pytest.raises(LimitError):
        log(dialogue)


def test_ten_seconds_of_lines_may_come_at_once() -> None:
    dialogue = a_dialogue(log_lines_per_s=5)
    for _ in range(50):
        log(dialogue)
    with pytest.raises(LimitError, match=r"more than 5 lines a second.*NDIF_MAX_LOG_LINES_PER_S"):
        log(dialogue)


def test_lines_come_back_with_time() -> None:
    clock = Clock()
    dialogue = a_dialogue(log_lines_per_s=5, clock=clock)
    for _ in range(50):
        log(dialogue)
    clock.now += 2
    for _ in range(10):
        log(dialogue)
    with pytest.raises(LimitError):
        log(dialogue)


def test_lines_do_not_pile_up() -> None:
    clock = Clock()
    dialogue = a_dialogue(log_lines_per_s=5, clock=clock)
    clock.now += 3600
    for _ in range(50):
        log(dialogue)
    with pytest.raises(LimitError):
        log(dialogue)


def test_a_rate_below_the_limit_goes_on_for_ever() -> None:
    clock = Clock()
    dialogue = a_dialogue(log_lines_per_s=5, clock=clock)
    for _ in range(10_000):
        clock.now += 0.2
        log(dialogue)


def test_lines_of_one_frame_count_each() -> None:
    dialogue = a_dialogue(log_lines_per_s=1)
    log(dialogue, b"\n" * 9)
    with pytest.raises(LimitError):
        log(dialogue)


def test_empty_frames_count_as_lines() -> None:
    dialogue = a_dialogue(log_lines_per_s=0.1)
    log(dialogue, b"")
    with pytest.raises(LimitError, match=r"more than 0\.1 lines a second"):
        log(dialogue, b"")


def test_a_clock_that_stands_still_gives_nothing_back() -> None:
    dialogue = a_dialogue(log_lines_per_s=1)
    for _ in range(10):
        log(dialogue)
    with pytest.raises(LimitError):
        log(dialogue)


# How much is streamed.


def test_streams_to_the_last_byte() -> None:
    dialogue = a_dialogue(streamed_bytes=2 * FRAME + 10)
    stream(dialogue, b"x" * 4)
    stream(dialogue, b"x" * 6)
    with pytest.raises(LimitError, match=r"more than 522 bytes.*NDIF_MAX_STREAMED_BYTES"):
        stream(dialogue)


def test_one_byte_too_many_at_once() -> None:
    dialogue = a_dialogue(streamed_bytes=FRAME + 10)
    with pytest.raises(LimitError):
        stream(dialogue, b"x" * 11)


def test_empty_streamed_frames_have_an_end() -> None:
    dialogue = a_dialogue(streamed_bytes=100 * FRAME)
    for _ in range(100):
        stream(dialogue)
    with pytest.raises(LimitError):
        stream(dialogue)


def test_logs_and_streams_are_counted_apart() -> None:
    dialogue = a_dialogue(log_bytes=10, streamed_bytes=FRAME + 10)
    log(dialogue, b"x" * 10)
    stream(dialogue, b"x" * 10)
    with pytest.raises(LimitError, match="NDIF_MAX_LOG_BYTES"):
        log(dialogue)
    with pytest.raises(LimitError, match="NDIF_MAX_STREAMED_BYTES"):
        stream(dialogue)


def test_results_and_errors_are_not_counted_here() -> None:
    dialogue = a_dialogue(log_bytes=1, streamed_bytes=1)
    assert dialogue.hear({"kind": "result"}, bytes(1000)) == "result"
    assert a_dialogue(log_bytes=1).hear({"kind": "error"}, bytes(1000)) == "error"


# What a run cost.


@pytest.mark.parametrize(
    "meta",
    [
        {"execution_time": 0.25, "peak_memory": 1 << 40},
        {"execution_time": 0, "peak_memory": 0},
        {"execution_time": 0.0, "peak_memory": 0.5},
        {"peak_memory": 1, "execution_time": 1},
    ],
)
def test_a_cost(meta: dict[str, Any]) -> None:
    header = {"kind": "result", "meta": meta, "and": "more"}
    assert meta_of(header) == meta
    assert meta_of(header) is not meta


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"meta": None},
        {"meta": []},
        {"meta": "execution_time peak_memory"},
        {"meta": 1},
        {"meta": [["execution_time", 1], ["peak_memory", 1]]},
        {"meta": {}},
        {"meta": {"execution_time": 1}},
        {"meta": {"peak_memory": 1}},
        {"meta": {"execution_time": 1, "peak_memory": 1, "more": 1}},
        {"meta": {"execution_time": 1, "Peak_memory": 1}},
    ],
)
def test_no_cost(header: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="what the run cost is missing"):
        meta_of(header)


@pytest.mark.parametrize("name", ["execution_time", "peak_memory"])
@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -1,
        -1e-9,
        True,
        False,
        None,
        "1",
        "",
        b"1",
        [1],
        {"value": 1},
        1j,
    ],
    ids=repr,
)
def test_a_cost_that_is_no_number(name: str, value: object) -> None:
    meta = {"execution_time": 1, "peak_memory": 1, name: value}
    with pytest.raises(ProtocolError, match="what the run cost is no number"):
        meta_of({"meta": meta})


@pytest.mark.parametrize("name", ["execution_time", "peak_memory"])
def test_a_cost_that_no_float_holds(name: str) -> None:
    # JSON has integers of a thousand digits, too, and whoever makes a float of one fails.
    meta = {"execution_time": 1, "peak_memory": 1, name: 10**1000}
    with pytest.raises(ProtocolError, match="what the run cost is no number"):
        meta_of({"meta": meta})
