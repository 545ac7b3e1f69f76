"""The frames that a runner may send: their order, their size, and the cost that they report."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ndif.host.channel import ProtocolError
from ndif.host.runner_protocol import (
    LimitError,
    Limits,
    NoLiveClientError,
    RunnerProtocol,
    parse_meta,
    parse_steps,
)
from ndif.runtime.frames import MAX_TEXT
from ndif.schema.step import RUNNER, Step

FRAME = 256
"""Bytes that an empty streamed frame counts for."""

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


def a_protocol(
    *,
    log_bytes: int = 1 << 30,
    log_lines_per_s: float = 1e9,
    streamed_bytes: int = 1 << 30,
    clock: Clock | None = None,
    is_hybrid: bool = True,
    state: str = "during",
) -> RunnerProtocol:
    limits = Limits(log_bytes, log_lines_per_s, streamed_bytes, frame_bytes=1000)
    protocol = RunnerProtocol(limits, is_hybrid=is_hybrid, clock=clock or Clock())
    for kind in PATHS[state]:
        protocol.accept({"kind": kind}, b"")
    return protocol


def log(protocol: RunnerProtocol, body: bytes = b"x") -> None:
    assert protocol.accept({"kind": "log"}, body) == "log"


def stream(protocol: RunnerProtocol, body: bytes = b"") -> None:
    assert protocol.accept({"kind": "stream"}, body) == "stream"


# Which may come when.


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", EVERY)
def test_each_kind_in_each_state(state: str, kind: str) -> None:
    protocol = a_protocol(state=state)
    if kind in STATES[state]:
        assert protocol.accept({"kind": kind}, b"x") == kind
    else:
        with pytest.raises(ProtocolError, match="is not allowed in this state"):
            protocol.accept({"kind": kind}, b"x")


@pytest.mark.parametrize("kind", ["stream", "await upload"])
def test_a_polling_client_gets_no_hybrid_frames(kind: str) -> None:
    limits = Limits(1000, 1000, 1000, 1000)
    protocol = RunnerProtocol(limits, is_hybrid=True, has_live_client=False, clock=Clock())
    assert protocol.accept({"kind": "running"}, b"") == "running"
    assert protocol.accept({"kind": "log"}, b"x") == "log"
    with pytest.raises(NoLiveClientError, match="blocking=True"):
        protocol.accept({"kind": kind}, b"")


@pytest.mark.parametrize(
    ("state", "kind"), [(state, kind) for state in STATES for kind in sorted(STATES[state])]
)
def test_the_state_after_each_kind(state: str, kind: str) -> None:
    protocol = a_protocol(state=state)
    protocol.accept({"kind": kind}, b"")
    after = {"running": DURING, "spill": SPILLING}.get(kind, STATES[state])
    for following in EVERY:
        trial = a_protocol(state=state)
        trial.accept({"kind": kind}, b"")
        if following in after:
            trial.accept({"kind": following}, b"")
        else:
            with pytest.raises(ProtocolError):
                trial.accept({"kind": following}, b"")


def test_all_frames_of_a_request() -> None:
    protocol = a_protocol(state="before")
    kinds = [
        "idle", "running", "log", "stream", "await upload", "stream", "log", "spill", "spilled"
    ]  # fmt: skip
    assert [protocol.accept({"kind": kind}, b"x") for kind in kinds] == kinds


def test_a_request_runs_once() -> None:
    protocol = a_protocol()
    with pytest.raises(ProtocolError, match="frame 'running' is not allowed in this state"):
        protocol.accept({"kind": "running"}, b"")


def test_a_request_spills_once() -> None:
    # Each would have another made for it.
    protocol = a_protocol(state="spilling")
    with pytest.raises(ProtocolError, match="'spill' is not allowed in this state"):
        protocol.accept({"kind": "spill"}, b"")


def test_nothing_is_printed_or_streamed_while_a_file_is_written() -> None:
    for kind in ("log", "stream", "await upload", "result"):
        with pytest.raises(ProtocolError):
            a_protocol(state="spilling").accept({"kind": kind}, b"")


def test_hybrid_frames_need_a_hybrid_client() -> None:
    for kind in ("stream", "await upload"):
        with pytest.raises(ProtocolError, match="is not allowed in this state"):
            a_protocol(is_hybrid=False).accept({"kind": kind}, b"")
    log(a_protocol(is_hybrid=False))


def test_the_largest_body_of_each_kind() -> None:
    room = a_protocol().max_body_bytes
    assert {room({"kind": kind}) for kind in ("result", "stream")} == {1000}
    assert {room({"kind": kind}) for kind in ("log", "error")} == {MAX_TEXT}
    others = set(EVERY) - {"result", "stream", "log", "error"}
    assert {room({"kind": kind}) for kind in others} == {0}


def test_a_refused_kind_is_shortened_in_the_message() -> None:
    with pytest.raises(ProtocolError) as refused:
        a_protocol().accept({"kind": "x" * 10_000}, b"")
    assert str(refused.value) == f"a frame '{'x' * 20}' is not allowed in this state"


# How much is printed.


def test_logs_to_the_last_byte() -> None:
    protocol = a_protocol(log_bytes=10)
    log(protocol, b"x" * 4)
    log(protocol, b"x" * 6)
    log(protocol, b"")
    with pytest.raises(LimitError, match=r"more than 10B.*NDIF_MAX_LOG_BYTES"):
        log(protocol)


def test_logs_do_not_become_fewer_with_time() -> None:
    clock = Clock()
    protocol = a_protocol(log_bytes=10, clock=clock)
    log(protocol, b"x" * 10)
    clock.now += 1e6
    with pytest.raises(LimitError):
        log(protocol)


def test_ten_seconds_of_lines_may_come_at_once() -> None:
    protocol = a_protocol(log_lines_per_s=5)
    for _ in range(50):
        log(protocol)
    with pytest.raises(LimitError, match=r"more than 5 lines a second.*NDIF_MAX_LOG_LINES_PER_S"):
        log(protocol)


def test_allowed_lines_return_with_time() -> None:
    clock = Clock()
    protocol = a_protocol(log_lines_per_s=5, clock=clock)
    for _ in range(50):
        log(protocol)
    clock.now += 2
    for _ in range(10):
        log(protocol)
    with pytest.raises(LimitError):
        log(protocol)


def test_allowed_lines_do_not_accumulate() -> None:
    clock = Clock()
    protocol = a_protocol(log_lines_per_s=5, clock=clock)
    clock.now += 3600
    for _ in range(50):
        log(protocol)
    with pytest.raises(LimitError):
        log(protocol)


def test_a_rate_below_the_limit_goes_on_for_ever() -> None:
    clock = Clock()
    protocol = a_protocol(log_lines_per_s=5, clock=clock)
    for _ in range(10_000):
        clock.now += 0.2
        log(protocol)


def test_lines_of_one_frame_count_each() -> None:
    protocol = a_protocol(log_lines_per_s=1)
    log(protocol, b"\n" * 9)
    with pytest.raises(LimitError):
        log(protocol)


def test_empty_frames_count_as_lines() -> None:
    protocol = a_protocol(log_lines_per_s=0.1)
    log(protocol, b"")
    with pytest.raises(LimitError, match=r"more than 0\.1 lines a second"):
        log(protocol, b"")


def test_a_clock_that_stands_still_allows_no_more_lines() -> None:
    protocol = a_protocol(log_lines_per_s=1)
    for _ in range(10):
        log(protocol)
    with pytest.raises(LimitError):
        log(protocol)


# How much is streamed.


def test_streams_to_the_last_byte() -> None:
    protocol = a_protocol(streamed_bytes=2 * FRAME + 10)
    stream(protocol, b"x" * 4)
    stream(protocol, b"x" * 6)
    with pytest.raises(LimitError, match=r"more than 522B.*NDIF_MAX_STREAMED_BYTES"):
        stream(protocol)


def test_one_byte_too_many_at_once() -> None:
    protocol = a_protocol(streamed_bytes=FRAME + 10)
    with pytest.raises(LimitError):
        stream(protocol, b"x" * 11)


def test_empty_streamed_frames_have_an_end() -> None:
    protocol = a_protocol(streamed_bytes=100 * FRAME)
    for _ in range(100):
        stream(protocol)
    with pytest.raises(LimitError):
        stream(protocol)


def test_logs_and_streams_are_counted_apart() -> None:
    protocol = a_protocol(log_bytes=10, streamed_bytes=FRAME + 10)
    log(protocol, b"x" * 10)
    stream(protocol, b"x" * 10)
    with pytest.raises(LimitError, match="NDIF_MAX_LOG_BYTES"):
        log(protocol)
    with pytest.raises(LimitError, match="NDIF_MAX_STREAMED_BYTES"):
        stream(protocol)


def test_results_and_errors_are_not_counted_here() -> None:
    protocol = a_protocol(log_bytes=1, streamed_bytes=1)
    assert protocol.accept({"kind": "result"}, bytes(1000)) == "result"
    assert a_protocol(log_bytes=1).accept({"kind": "error"}, bytes(1000)) == "error"


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
    assert parse_meta(header) == meta
    assert parse_meta(header) is not meta


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
    with pytest.raises(ProtocolError, match="a frame lacks the execution time or the peak memory"):
        parse_meta(header)


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
    with pytest.raises(
        ProtocolError, match="the execution time or the peak memory is not a valid number"
    ):
        parse_meta({"meta": meta})


@pytest.mark.parametrize("name", ["execution_time", "peak_memory"])
def test_a_cost_that_no_float_holds(name: str) -> None:
    # JSON has integers of a thousand digits, too, and whoever makes a float of one fails.
    meta = {"execution_time": 1, "peak_memory": 1, name: 10**1000}
    with pytest.raises(
        ProtocolError, match="the execution time or the peak memory is not a valid number"
    ):
        parse_meta({"meta": meta})


# What a run did, and when.


def test_steps_of_a_run() -> None:
    header = {"steps": [["prepare", 10.0, 10.5], ["execute", 10.5, 11.0], ["pack", 11.0, 12.0]]}
    assert parse_steps(header, 9.0, 12.0) == [
        Step("prepare", RUNNER, 10.0, 10.5),
        Step("execute", RUNNER, 10.5, 11.0),
        Step("pack", RUNNER, 11.0, 12.0),
    ]
    assert parse_steps({}, 9.0, 12.0) == []


@pytest.mark.parametrize(
    ("reported", "is_taken_as"),
    [((0.0, 99.0), (9.0, 12.0)), ((99.0, 0.0), (12.0, 12.0)), ((11.0, 10.0), (11.0, 11.0))],
)
def test_no_step_is_outside_of_its_run(
    reported: tuple[float, float], is_taken_as: tuple[float, float]
) -> None:
    (step,) = parse_steps({"steps": [["execute", *reported]]}, 9.0, 12.0)
    assert step == Step("execute", RUNNER, *is_taken_as)


@pytest.mark.parametrize(
    "steps",
    [
        None,
        1,
        "steps",
        {"execute": 1},
        [[]],
        ["execute"],
        [["execute", 1.0]],
        [["execute", 1.0, 2.0, 3.0]],
        [["another", 1.0, 2.0]],
        [[1, 1.0, 2.0]],
        [[["execute"], 1.0, 2.0]],
        [["execute", "1", 2.0]],
        [["execute", True, 2.0]],
        [["execute", float("nan"), 2.0]],
        [["execute", 1.0, float("inf")]],
        [["execute", 1.0, 2.0]] * 4,
    ],
)
def test_no_steps(steps: Any) -> None:
    with pytest.raises(ProtocolError, match="step"):
        parse_steps({"steps": steps}, 9.0, 12.0)
