"""Fair scheduling of work of which few pieces may run at a time; short pieces go ahead of long ones."""

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
    """A scheduler that runs few pieces of work at a time.

    The next piece is one that was interrupted least, then one of the owner with the least running, then
    the one that waits longest. While others wait, work that takes long is cancelled and begins anew after
    them with twice the time, so that it ends eventually.
    """

    at_once: int
    first_s: float
    """Seconds that a first attempt may take while others wait."""
    _waiting: dict[_Turn, asyncio.Future[None]] = field(default_factory=dict)
    _running: Counter[str] = field(default_factory=Counter)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while more pieces of work wait than make room."""
    _leaving: int = 0
    """Number of pieces of work that were cancelled to make room, and have not ended."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, owner: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`, which may be started several times."""
        turn = _Turn(owner, next(self._numbers))
        while True:
            await self._enter(turn)
            running = asyncio.create_task(work(), name="turn")
            try:
                if not await self._must_leave(running, self.first_s * 2**turn.interruptions):
                    return running.result()
            finally:
                try:
                    await end([running])
                finally:
                    self._leave(turn)
            turn.interruptions += 1

    async def _enter(self, turn: _Turn) -> None:
        if self._running.total() < self.at_once:
            self._running[turn.owner] += 1
            return
        entered = self._waiting[turn] = asyncio.get_running_loop().create_future()
        self._look()
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled():  # it was let in at the same moment
                self._leave(turn)
            raise
        finally:
            self._waiting.pop(turn, None)
            self._look()

    async def _must_leave(self, running: asyncio.Task[T], seconds: float) -> bool:
        """Wait for work; cancel it and return True if its time is over and others wait."""
        await asyncio.wait({running}, timeout=seconds)
        while not running.done():
            wanted = asyncio.ensure_future(self._wanted.wait())
            try:
                await asyncio.wait({running, wanted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                wanted.cancel()
            if not running.done() and self._wanted.is_set():
                self._leaving += 1
                self._look()
                try:
                    await end([running])
                finally:
                    self._leaving -= 1
                return True
        return False

    def _leave(self, turn: _Turn) -> None:
        """Give the place of a piece of work to the next one."""
        self._running[turn.owner] -= 1
        self._running += Counter()  # forget owners without work
        if self._waiting:
            following = min(
                self._waiting,
                key=lambda each: (each.interruptions, self._running[each.owner], each.number),
            )
            self._running[following.owner] += 1
            self._waiting.pop(following).set_result(None)
        self._look()

    def _look(self) -> None:
        if len(self._waiting) > self._leaving:
            self._wanted.set()
        else:
            self._wanted.clear()


@dataclass(eq=False, slots=True)
class _Turn:
    owner: str
    number: int
    interruptions: int = 0
