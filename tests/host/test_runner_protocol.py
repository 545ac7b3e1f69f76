"""The frames that a runner may send: their order, their size, and the cost that they report."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ndif.host.channel import ProtocolError
from ndif.host.runner_protocol import (
    FrameLimits,
    LimitError,
    NoLiveClientError,
    RunnerProtocol,
    steps_of,
)
from ndif.runtime.frames import MAX_TEXT, unpack
from ndif.runtime.messages import (
    Error,
    Forked,
    Message,
    Returned,
    RunReport,
    SharedRunOrder,
    SharedRunResults,
    Signal,
    Spill,
    Spilled,
    Verified,
    kind_of,
)
from ndif.schema.step import RUNNER, Step

FRAME = 256
"""Bytes that an empty streamed frame counts for."""

BEFORE = {"idle", "running"}
DURING = {"log", "stream", "await upload", "spill", "returned", "error"}
SPILLING = {"spilled", "error"}
STATES = {"before": BEFORE, "during": DURING, "spilling": SPILLING}
PATHS: dict[str, list[str]] = {
    "before": [],
    "during": ["idle", "running"],
    "spilling": ["running", "log", "spill"],
}
STRANGE = [
    "shared run order",
    "forked",
    "verified",
    "failed",
    "file",
    "upload",
    "shared run results",
]
EVERY = sorted(BEFORE | DURING | SPILLING | set(STRANGE))
REPORT = RunReport(1, ())
MESSAGES: dict[str, Message] = {
    kind_of(message): message
    for message in (
        *(*Signal, Spill(1), Spilled(REPORT), Returned(True, REPORT), Error(REPORT)),
        *(SharedRunOrder(()), Forked("runner", 1), Verified(0), SharedRunResults((), REPORT)),
    )
}


def of(kind: str) -> Message:
    return MESSAGES[kind]


def read(header: dict[str, Any]) -> Message:
    """Return the message that a host parses from a header."""
    message, _ = unpack(json.dumps(header).encode())
    return message


class Clock:
    """A clock that a test sets."""

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
    limits = FrameLimits(log_bytes, log_lines_per_s, streamed_bytes, frame_bytes=1000)
    protocol = RunnerProtocol(limits, is_hybrid=is_hybrid, clock=clock or Clock())
    for kind in PATHS[state]:
        protocol.accept(of(kind), b"")
    return protocol


def log(protocol: RunnerProtocol, body: bytes = b"x") -> None:
    protocol.accept(of("log"), body)


def stream(protocol: RunnerProtocol, body: bytes = b"") -> None:
    protocol.accept(of("stream"), body)


# Order of frames.


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", EVERY)
def test_only_allowed_frames_are_accepted_in_each_state(state: str, kind: str) -> None:
    protocol = a_protocol(state=state)
    if kind in STATES[state]:
        protocol.accept(of(kind), b"x")
    else:
        with pytest.raises(ProtocolError, match="is not allowed in this state"):
            protocol.accept(of(kind), b"x")


@pytest.mark.parametrize("kind", ["stream", "await upload"])
def test_polling_client_gets_no_hybrid_frames(kind: str) -> None:
    limits = FrameLimits(1000, 1000, 1000, 1000)
    protocol = RunnerProtocol(limits, is_hybrid=True, has_live_client=False, clock=Clock())
    protocol.accept(of("running"), b"")
    protocol.accept(of("log"), b"x")
    with pytest.raises(NoLiveClientError, match="blocking=True"):
        protocol.accept(of(kind), b"")


@pytest.mark.parametrize(
    ("state", "kind"), [(state, kind) for state in STATES for kind in sorted(STATES[state])]
)
def test_each_frame_leads_to_its_state(state: str, kind: str) -> None:
    protocol = a_protocol(state=state)
    protocol.accept(of(kind), b"")
    after = {"running": DURING, "spill": SPILLING}.get(kind, STATES[state])
    for following in EVERY:
        trial = a_protocol(state=state)
        trial.accept(of(kind), b"")
        if following in after:
            trial.accept(of(following), b"")
        else:
            with pytest.raises(ProtocolError):
                trial.accept(of(following), b"")


def test_complete_sequence_of_frames_is_accepted() -> None:
    protocol = a_protocol(state="before")
    kinds = [
        "idle", "running", "log", "stream", "await upload", "stream", "log", "spill", "spilled"
    ]  # fmt: skip
    for kind in kinds:
        protocol.accept(of(kind), b"x")


def test_second_running_frame_is_rejected() -> None:
    protocol = a_protocol()
    with pytest.raises(ProtocolError, match="frame 'running' is not allowed in this state"):
        protocol.accept(of("running"), b"")


def test_second_spill_frame_is_rejected() -> None:
    # Each spill frame would make the host create another file.
    protocol = a_protocol(state="spilling")
    with pytest.raises(ProtocolError, match="'spill' is not allowed in this state"):
        protocol.accept(of("spill"), b"")


def test_logs_and_streams_are_rejected_while_spilling() -> None:
    for kind in ("log", "stream", "await upload", "returned"):
        with pytest.raises(ProtocolError):
            a_protocol(state="spilling").accept(of(kind), b"")


def test_hybrid_frames_need_a_hybrid_client() -> None:
    for kind in ("stream", "await upload"):
        with pytest.raises(ProtocolError, match="is not allowed in this state"):
            a_protocol(is_hybrid=False).accept(of(kind), b"")
    log(a_protocol(is_hybrid=False))


def test_body_size_limit_depends_on_frame_kind() -> None:
    room = a_protocol().max_body_bytes
    assert {room(of(kind)) for kind in ("returned", "stream")} == {1000}
    assert {room(of(kind)) for kind in ("log", "error")} == {MAX_TEXT}
    others = set(EVERY) - {"returned", "stream", "log", "error"}
    assert {room(of(kind)) for kind in others} == {0}


def test_error_shortens_unknown_frame_kind() -> None:
    for kind in ("", "Running", "running ", "\0", "x" * 10_000):
        with pytest.raises(ValueError, match="there is no frame") as refused:
            read({"kind": kind})
        assert str(refused.value) == f"there is no frame {kind[:20]!r}"


# Limits of logs.


def test_log_limit_is_exact_in_bytes() -> None:
    protocol = a_protocol(log_bytes=10)
    log(protocol, b"x" * 4)
    log(protocol, b"x" * 6)
    log(protocol, b"")
    with pytest.raises(LimitError, match=r"more than 10B.*NDIF_MAX_LOG_BYTES"):
        log(protocol)


def test_log_byte_limit_does_not_recover_with_time() -> None:
    clock = Clock()
    protocol = a_protocol(log_bytes=10, clock=clock)
    log(protocol, b"x" * 10)
    clock.now += 1e6
    with pytest.raises(LimitError):
        log(protocol)


def test_burst_of_ten_seconds_of_log_lines_is_allowed() -> None:
    protocol = a_protocol(log_lines_per_s=5)
    for _ in range(50):
        log(protocol)
    with pytest.raises(LimitError, match=r"more than 5 lines a second.*NDIF_MAX_LOG_LINES_PER_S"):
        log(protocol)


def test_log_line_allowance_recovers_with_time() -> None:
    clock = Clock()
    protocol = a_protocol(log_lines_per_s=5, clock=clock)
    for _ in range(50):
        log(protocol)
    clock.now += 2
    for _ in range(10):
        log(protocol)
    with pytest.raises(LimitError):
        log(protocol)


def test_log_line_allowance_does_not_accumulate() -> None:
    clock = Clock()
    protocol = a_protocol(log_lines_per_s=5, clock=clock)
    clock.now += 3600
    for _ in range(50):
        log(protocol)
    with pytest.raises(LimitError):
        log(protocol)


def test_log_rate_at_limit_is_never_rejected() -> None:
    clock = Clock()
    protocol = a_protocol(log_lines_per_s=5, clock=clock)
    for _ in range(10_000):
        clock.now += 0.2
        log(protocol)


def test_each_line_of_log_frame_counts() -> None:
    protocol = a_protocol(log_lines_per_s=1)
    log(protocol, b"\n" * 9)
    with pytest.raises(LimitError):
        log(protocol)


def test_empty_log_frames_count_as_lines() -> None:
    protocol = a_protocol(log_lines_per_s=0.1)
    log(protocol, b"")
    with pytest.raises(LimitError, match=r"more than 0\.1 lines a second"):
        log(protocol, b"")


def test_log_line_allowance_needs_passing_time() -> None:
    protocol = a_protocol(log_lines_per_s=1)
    for _ in range(10):
        log(protocol)
    with pytest.raises(LimitError):
        log(protocol)


# Limits of streams.


def test_stream_limit_is_exact_in_bytes() -> None:
    protocol = a_protocol(streamed_bytes=2 * FRAME + 10)
    stream(protocol, b"x" * 4)
    stream(protocol, b"x" * 6)
    with pytest.raises(LimitError, match=r"more than 522B.*NDIF_MAX_STREAMED_BYTES"):
        stream(protocol)


def test_single_frame_over_stream_limit_is_rejected() -> None:
    protocol = a_protocol(streamed_bytes=FRAME + 10)
    with pytest.raises(LimitError):
        stream(protocol, b"x" * 11)


def test_number_of_empty_stream_frames_is_limited() -> None:
    protocol = a_protocol(streamed_bytes=100 * FRAME)
    for _ in range(100):
        stream(protocol)
    with pytest.raises(LimitError):
        stream(protocol)


def test_logs_and_streams_have_separate_limits() -> None:
    protocol = a_protocol(log_bytes=10, streamed_bytes=FRAME + 10)
    log(protocol, b"x" * 10)
    stream(protocol, b"x" * 10)
    with pytest.raises(LimitError, match="NDIF_MAX_LOG_BYTES"):
        log(protocol)
    with pytest.raises(LimitError, match="NDIF_MAX_STREAMED_BYTES"):
        stream(protocol)


def test_results_and_errors_do_not_count_towards_limits() -> None:
    protocol = a_protocol(log_bytes=1, streamed_bytes=1)
    protocol.accept(of("returned"), bytes(1000))
    a_protocol(log_bytes=1).accept(of("error"), bytes(1000))


# The cost of a run, and its steps.


@pytest.mark.parametrize("peak", [0, 1, 1 << 40])
def test_run_report_is_parsed(peak: int) -> None:
    header = {"kind": "error", "report": {"peak_memory": peak, "steps": []}, "and": "more"}
    assert read(header) == Error(RunReport(peak, ()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"report": None},
        {"report": []},
        {"report": "peak_memory steps"},
        {"report": 1},
        {"report": [["peak_memory", 1], ["steps", []]]},
        {"report": {}},
        {"report": {"steps": []}},
        {"report": {"peak_memory": 1}},
        {"report": {"Peak_memory": 1, "steps": []}},
    ],
)
def test_malformed_run_report_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"report|`object`|peak_memory|steps"):
        read({"kind": "error", **fields})


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -1,
        -1e-9,
        0.5,
        True,
        False,
        None,
        "1",
        "",
        [1],
        {"value": 1},
        # JSON has integers of a thousand digits, too, and a float of one fails.
        10**1000,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_invalid_peak_memory_is_rejected(value: object) -> None:
    with pytest.raises(ValueError, match=r"malformed|\$\.report\.peak_memory"):
        read({"kind": "error", "report": {"peak_memory": value, "steps": []}})


def steps(*reported: object) -> RunReport:
    """Return the report that is read from these steps."""
    message = read({"kind": "spilled", "report": {"peak_memory": 1, "steps": [*reported]}})
    assert isinstance(message, Spilled)
    return message.report


def a_step(name: object = "execute", start: object = 1.0, end: object = 2.0) -> dict[str, object]:
    return {"name": name, "start": start, "end": end}


def test_steps_of_run_are_parsed() -> None:
    report = steps(
        a_step("prepare", 10.0, 10.5), a_step("execute", 10.5, 11.0), a_step("pack", 11.0, 12.0)
    )
    assert steps_of(report, 9.0, 12.0) == [
        Step("prepare", RUNNER, 10.0, 10.5),
        Step("execute", RUNNER, 10.5, 11.0),
        Step("pack", RUNNER, 11.0, 12.0),
    ]
    assert steps_of(steps(), 9.0, 12.0) == []


@pytest.mark.parametrize(
    ("reported", "is_taken_as"),
    [((0.0, 99.0), (9.0, 12.0)), ((99.0, 0.0), (12.0, 12.0)), ((11.0, 10.0), (11.0, 11.0))],
)
def test_steps_are_clamped_to_duration_of_run(
    reported: tuple[float, float], is_taken_as: tuple[float, float]
) -> None:
    (step,) = steps_of(steps(a_step("execute", *reported)), 9.0, 12.0)
    assert step == Step("execute", RUNNER, *is_taken_as)


@pytest.mark.parametrize("reported", [[a_step("another")], [a_step()] * 4])
def test_unknown_or_surplus_steps_are_rejected(reported: list[object]) -> None:
    with pytest.raises(ProtocolError, match="a frame has steps that no run has"):
        steps_of(steps(*reported), 9.0, 12.0)


@pytest.mark.parametrize(
    "reported",
    [
        None,
        1,
        "steps",
        {"execute": 1},
        [[]],
        ["execute"],
        [["execute", 1.0, 2.0]],
        [{"name": "execute", "start": 1.0}],
        [a_step(name=1)],
        [a_step(name=["execute"])],
        [a_step(start="1")],
        [a_step(start=True)],
        [a_step(start=math.nan)],
        [a_step(end=math.inf)],
    ],
)
def test_malformed_steps_are_rejected(reported: object) -> None:
    with pytest.raises(ValueError, match=r"malformed|\$\.report\.steps"):
        read({"kind": "spilled", "report": {"peak_memory": 1, "steps": reported}})
