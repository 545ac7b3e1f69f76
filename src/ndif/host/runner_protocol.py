"""What a runner may say, in which order and how much of it: it may be in a stranger's hands."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ndif.host.channel import ProtocolError
from ndif.runtime.frames import MAX_TEXT

_BEFORE = frozenset({"idle", "running"})
_DURING = frozenset({"log", "spill", "result", "error"})
_CONVERSING = frozenset({"stream", "await upload"})
_SPILLING = frozenset({"spilled", "error"})
_BURST_S = 10
_ENDLESS = 1 << 63
_FRAME_COST = 256
"""Bytes that a streamed frame counts for beside its content: empty ones are not free either."""


class LimitError(Exception):
    """A request went over a limit; the message is for its user."""


class UnheardError(Exception):
    """A block speaks to a client that does not listen; the message is for its user."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may send its user before it is done."""

    log_bytes: int
    log_lines_per_s: float
    streamed_bytes: int
    frame_bytes: int
    """Of a result in a frame, and of a function that is streamed."""


class Dialogue:
    """One request's frames, checked as they come."""

    def __init__(
        self,
        limits: Limits,
        *,
        converses: bool,
        listens: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`converses`: whether its client is of a kind that hybrid jobs can be sent to.

        `listens`: whether it is there while the job runs, or polls.
        """
        self._limits = limits
        self._during = _DURING | _CONVERSING if converses else _DURING
        self._listens = listens
        self._clock = clock
        self._expected = _BEFORE
        self._logged = self._streamed = 0
        self._lines = limits.log_lines_per_s * _BURST_S
        self._counted = clock()

    def room(self, header: Mapping[str, Any]) -> int:
        """How large a frame of this header may be."""
        match header["kind"]:
            case "result" | "stream":
                return self._limits.frame_bytes
            case "log" | "error":
                return MAX_TEXT
        return 0

    def hear(self, header: Mapping[str, Any], body: bytes) -> str:
        """The kind of a frame that may come now.

        Raises:
            ProtocolError: if it may not.
            LimitError: if it is one too many.
            UnheardError: if it is for a client that does not listen.
        """
        kind = str(header["kind"])
        if kind not in self._expected:
            raise ProtocolError(f"{kind[:20]!r} may not come here")
        if kind in _CONVERSING and not self._listens:
            raise UnheardError(
                "A part of this block runs on its client while the rest of it runs here, and a job that is "
                "polled has no live channel to its client. Run it with blocking=True, or leave that part "
                "(`with session.local()`, `.remote()`) out of it."
            )
        match kind:
            case "running":
                self._expected = self._during
            case "spill":
                self._expected = _SPILLING
            case "log":
                self._count_log(body)
            case "stream":
                self._count_stream(body)
        return kind

    def _count_log(self, body: bytes) -> None:
        self._logged += len(body)
        if self._logged > self._limits.log_bytes:
            raise LimitError(
                f"The block printed more than {self._limits.log_bytes:,} bytes, the most that this server "
                "passes on (NDIF_MAX_LOG_BYTES), and was ended. Save what you want to see, or print less."
            )
        now, rate = self._clock(), self._limits.log_lines_per_s
        most = rate * _BURST_S
        self._lines = min(most, self._lines + (now - self._counted) * rate)
        self._lines -= 1 + body.count(b"\n")
        self._counted = now
        if self._lines < 0:
            raise LimitError(
                f"The block printed more than {rate:g} lines a second, the most that this server passes on "
                "(NDIF_MAX_LOG_LINES_PER_S), and was ended. Collect lines and print them at once."
            )

    def _count_stream(self, body: bytes) -> None:
        self._streamed += len(body) + _FRAME_COST
        if self._streamed > self._limits.streamed_bytes:
            raise LimitError(
                f"The block sent its client more than {self._limits.streamed_bytes:,} bytes while it ran, "
                "the most that this server passes on (NDIF_MAX_STREAMED_BYTES), and was ended. Return "
                "large values with .save()."
            )


def meta_of(header: Mapping[str, Any]) -> dict[str, float]:
    """What a run cost, if that is what the header says: seconds and bytes.

    Raises:
        ProtocolError: if it says anything else.
    """
    meta = header.get("meta")
    if not isinstance(meta, dict) or meta.keys() != {"execution_time", "peak_memory"}:
        raise ProtocolError("what the run cost is missing")
    for value in meta.values():
        if type(value) not in (int, float) or not 0 <= value < _ENDLESS:
            raise ProtocolError("what the run cost is no number")
    return dict(meta)
