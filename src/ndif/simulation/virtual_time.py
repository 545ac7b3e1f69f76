"""An event loop in virtual time: instead of sleeping, its clock jumps to the next timer.

It runs ordinary asyncio code that waits only for timers and for other code on the same loop. Input and
output, threads and processes are refused, because they take real time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from ndif.config.units import format_duration
from ndif.tasks import end

T = TypeVar("T")

_MOST_NAMED = 5
_RESOLUTION_S = time.get_clock_info("monotonic").resolution
"""Resolution of an event loop's clock: times closer together are one moment."""


class DeadlockError(RuntimeError):
    """No task is ready and no timer is set, so every task would wait forever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0 and advances only while every task waits.

    A wait that could never end raises `DeadlockError`.
    """

    def __init__(self) -> None:
        self._clock = _Clock(lambda: _waiting(self))
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._clock.now

    def run_in_executor(self, *_: object) -> NoReturn:
        """Refuse: a thread takes real time."""
        raise RuntimeError("There are no threads in virtual time.")

    async def subprocess_exec(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a process takes real time."""
        raise RuntimeError("There are no processes in virtual time.")

    subprocess_shell = subprocess_exec


class _Clock(selectors.BaseSelector):
    """A selector that advances the clock: a loop calls `select` when it would sleep."""

    def __init__(self, waiting: Callable[[], str]) -> None:
        self.now = 0.0
        self._waiting = waiting
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock; nothing is ever ready to be read or written."""
        if timeout is None:
            raise DeadlockError(
                f"At {format_duration(self.now)} of virtual time nothing is ready and no timer is set, "
                f"so this would never go on. {self._waiting()}"
            )
        self.now += timeout
        if timeout > 0 and math.ulp(self.now) > _RESOLUTION_S:
            # A loop runs timers due before now plus its resolution, but this sum rounds to now.
            self.now += 2 * math.ulp(self.now)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Accept the loop's own wake-up pipe, which is never used; refuse everything else."""
        if self._keys:
            raise RuntimeError("There is no input or output in virtual time.")
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, then cancel remaining tasks."""
    with contextlib.closing(VirtualLoop()) as loop:
        try:
            return loop.run_until_complete(main)
        finally:
            loop.run_until_complete(_end_others())
            loop.run_until_complete(loop.shutdown_asyncgens())


async def _end_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    await end(sorted(left, key=asyncio.Task.get_name))


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    names = sorted(task.get_name() for task in asyncio.all_tasks(loop))
    if len(names) > _MOST_NAMED:
        names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more"]
    return f"These wait: {', '.join(names)}." if names else "No task is left."
