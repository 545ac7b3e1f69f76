"""Fair scheduling of work that shares a few slots; short pieces go ahead of long ones."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ndif.tasks import end

T = TypeVar("T")


@dataclass(eq=False)
class MeasurementSlots:
    """A scheduler that runs a few pieces of work at a time.

    The next piece is the one with the fewest interruptions. Ties go to the owner with the fewest running
    pieces, then to the longest wait. While other pieces wait, a long piece is cancelled and restarts after
    them with twice the time, so that it ends eventually.
    """

    at_once: int
    first_s: float
    """Seconds that a first attempt may take while others wait."""
    _waiting: dict[_Piece, asyncio.Future[None]] = field(default_factory=dict)
    _running: Counter[str] = field(default_factory=Counter)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while more pieces wait than slots are being vacated."""
    _leaving: int = 0
    """Number of pieces that were cancelled to vacate a slot, and have not ended."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, owner: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`, which may be started several times."""
        piece = _Piece(owner, next(self._numbers))
        while True:
            await self._enter(piece)
            running = asyncio.create_task(work(), name="measurement")
            try:
                if not await self._must_leave(running, self.first_s * 2**piece.interruptions):
                    return running.result()
            finally:
                try:
                    await end([running])
                finally:
                    self._leave(piece)
            piece.interruptions += 1

    async def _enter(self, piece: _Piece) -> None:
        if self._running.total() < self.at_once:
            self._running[piece.owner] += 1
            return
        entered = self._waiting[piece] = asyncio.get_running_loop().create_future()
        self._update_wanted()
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled():  # it was admitted at the same moment
                self._leave(piece)
            raise
        finally:
            self._waiting.pop(piece, None)
            self._update_wanted()

    async def _must_leave(self, running: asyncio.Task[T], seconds: float) -> bool:
        """Wait for a piece; cancel it and return True if its time is over and other pieces wait."""
        await asyncio.wait({running}, timeout=seconds)
        while not running.done():
            wanted = asyncio.ensure_future(self._wanted.wait())
            try:
                await asyncio.wait({running, wanted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                wanted.cancel()
            if not running.done() and self._wanted.is_set():
                self._leaving += 1
                self._update_wanted()
                try:
                    await end([running])
                finally:
                    self._leaving -= 1
                return True
        return False

    def _leave(self, piece: _Piece) -> None:
        """Give the slot of a piece of work to the next one."""
        self._running[piece.owner] -= 1
        self._running += Counter()  # forget owners without work
        if self._waiting:
            following = min(
                self._waiting,
                key=lambda waiting: (
                    waiting.interruptions,
                    self._running[waiting.owner],
                    waiting.number,
                ),
            )
            self._running[following.owner] += 1
            self._waiting.pop(following).set_result(None)
        self._update_wanted()

    def _update_wanted(self) -> None:
        if len(self._waiting) > self._leaving:
            self._wanted.set()
        else:
            self._wanted.clear()


@dataclass(eq=False, slots=True)
class _Piece:
    owner: str
    number: int
    interruptions: int = 0
