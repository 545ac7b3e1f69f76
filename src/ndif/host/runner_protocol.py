"""The frames that a runner may send: their order, their number and their size.

Untrusted code may control a runner, so every frame is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ndif.host.channel import ProtocolError
from ndif.runtime.frames import MAX_TEXT
from ndif.runtime.messages import Message, RunReport, Spill, kind_of
from ndif.schema.step import RUNNER, Step
from ndif.sizes import format_size

BEFORE_RUN = frozenset({"idle", "running"})
_DURING_RUN = frozenset({"log", "spill", "returned", "error"})
_HYBRID = frozenset({"stream", "await upload"})
_AFTER_SPILL = frozenset({"spilled", "error"})
_STEPS = ("prepare", "execute", "pack")
_BURST_S = 10
_FRAME_COST = 256
"""Bytes counted for a streamed frame in addition to its content, so that empty frames are not free."""
UNLIMITED = (1 << 63) - 1
"""Bytes where there is no limit: the largest size that a frame can state."""
_ENVELOPE = 1 << 12
"""Bytes that a result in a frame of zstd may have beyond its content, however short it is."""
RESULT_LIMIT = "the limit for a result (NDIF_MAX_RESULT_BYTES, or a limit of your API key)"


class LimitReason(str):
    """A sentence for the user of a request that exceeded a limit, with the limit's name for metrics."""

    limit: str
    """`time`, `memory`, `threads` or `gpu_memory`."""

    def __new__(cls, sentence: str, limit: str) -> LimitReason:
        reason = super().__new__(cls, sentence)
        reason.limit = limit
        return reason


class LimitError(Exception):
    """A request exceeded a limit, `printed` or `streamed`; the message is for its user."""

    def __init__(self, sentence: str, limit: str) -> None:
        super().__init__(sentence)
        self.limit = limit


class NoLiveClientError(Exception):
    """A block sent data to a client without a live channel; the message is for its user."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The limits of the data that one request may send its user while it runs."""

    log_bytes: int
    log_lines_per_s: float
    streamed_bytes: int
    frame_bytes: int
    """Bytes of a result in a frame, and of a streamed frame."""
    result_bytes: int = UNLIMITED
    """Bytes of the caller's result before compression, and of all streamed values together."""
    inline_bytes: int = UNLIMITED
    """Bytes of a result in a frame, before compression."""

    @property
    def returned_bytes(self) -> int:
        """Return the most bytes of a result in a frame, in any form."""
        largest = largest_form(min(self.result_bytes, self.inline_bytes))
        return min(self.frame_bytes, largest)


def largest_form(result_bytes: int) -> int:
    """Return the most bytes of a result in any form: zstd makes incompressible data slightly larger."""
    return result_bytes + result_bytes // 1000 + _ENVELOPE


def check_size(size: int, limit: int) -> None:
    """Raise a `ProtocolError` if a result of `size` bytes is larger than `limit`.

    A runner itself refuses to send such a result, unless the user's code controls it.
    """
    if size > limit:
        raise ProtocolError(
            f"its result takes {format_size(size)}, more than {format_size(limit)}, {RESULT_LIMIT}"
        )


class RunnerProtocol:
    """A checker of the frames of one request as they arrive.

    Owns the request's state (before, during, spilling) and its counters. The caller acts on the frames.
    """

    def __init__(
        self,
        limits: FrameLimits,
        *,
        is_hybrid: bool,
        has_live_client: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start in the state before a run; `is_hybrid`: the client's wire has hybrid jobs."""
        self._limits = limits
        self._during = _DURING_RUN | _HYBRID if is_hybrid else _DURING_RUN
        self._has_live_client = has_live_client
        self._clock = clock
        self._expected = BEFORE_RUN
        self._logged = self._streamed = self._stream_frames = 0
        self._lines = limits.log_lines_per_s * _BURST_S
        self._counted = clock()

    def max_body_bytes(self, message: Message) -> int:
        """Return the largest body, in bytes, that a frame with this message may have."""
        match kind_of(message):
            case "returned":
                return self._limits.returned_bytes
            case "stream":
                return self._limits.frame_bytes
            case "log" | "error":
                return MAX_TEXT
        return 0

    def accept(self, message: Message, body: bytes) -> None:
        """Check a frame and count it.

        Raise a `ProtocolError` if no such frame may be sent in this state, and a `LimitError` if the frame
        exceeds a limit. Raise a `NoLiveClientError` if the frame is for a client without a live channel.
        """
        kind = kind_of(message)
        if kind not in self._expected:
            raise ProtocolError(f"a frame {kind!r} is not allowed in this state")
        if kind in _HYBRID and not self._has_live_client:
            raise NoLiveClientError(
                "A part of this block runs on its client while the rest of it runs here, and a job that is "
                "polled has no live channel to its client. Run it with blocking=True, or leave that part "
                "(`with session.local()`, `.remote()`) out of it."
            )
        if isinstance(message, Spill):
            check_size(message.size, self._limits.result_bytes)
        match kind:
            case "running":
                self._expected = self._during
            case "spill":
                self._expected = _AFTER_SPILL
            case "log":
                self._count_log(body)
            case "stream":
                self._count_stream(body)

    def _count_log(self, body: bytes) -> None:
        self._logged += len(body)
        if self._logged > self._limits.log_bytes:
            raise LimitError(
                f"The block printed more than {format_size(self._limits.log_bytes)}, the most that this "
                "server passes on (NDIF_MAX_LOG_BYTES), and was ended. Save what you want to see, or print "
                "less.",
                "printed",
            )
        now, rate = self._clock(), self._limits.log_lines_per_s
        max_lines = rate * _BURST_S
        self._lines = min(max_lines, self._lines + (now - self._counted) * rate)
        self._lines -= 1 + body.count(b"\n")
        self._counted = now
        if self._lines < 0:
            raise LimitError(
                f"The block printed more than {rate:g} lines a second, the most that this server passes on "
                "(NDIF_MAX_LOG_LINES_PER_S), and was ended. Collect lines and print them at once.",
                "printed",
            )

    def _count_stream(self, body: bytes) -> None:
        self._streamed += len(body)
        self._stream_frames += 1
        if self._streamed > self._limits.result_bytes:
            raise LimitError(
                f"The block sent its client more than {format_size(self._limits.result_bytes)} while it "
                f"ran, {RESULT_LIMIT}, and was ended. Send fewer values, or reduce them before.",
                "streamed",
            )
        if self._streamed + self._stream_frames * _FRAME_COST > self._limits.streamed_bytes:
            raise LimitError(
                f"The block sent its client more than {format_size(self._limits.streamed_bytes)} while it "
                "ran, the most that this server passes on (NDIF_MAX_STREAMED_BYTES), and was ended. Return "
                "large values with .save().",
                "streamed",
            )


def steps_of(report: RunReport, began: float, ended: float) -> list[Step]:
    """Return the reported steps of a run between these Unix times, or raise a `ProtocolError`.

    An untrusted runner may report any times, so they are cut to the run.
    """
    if len(report.steps) > len(_STEPS) or any(step.name not in _STEPS for step in report.steps):
        raise ProtocolError("a frame has steps that no run has")
    steps = []
    for step in report.steps:
        start = min(max(step.start, began), ended)
        steps.append(Step(step.name, RUNNER, start, min(max(step.end, start), ended)))
    return steps
