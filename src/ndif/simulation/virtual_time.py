"""An event loop in virtual time: instead of sleeping, the clock jumps to the next timer.

The loop runs ordinary asyncio code that waits only for timers and for other code on the same loop. It
refuses input and output, threads and processes, because they take real time.
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
"""Resolution of an event loop's clock; times closer together count as equal."""


class DeadlockError(RuntimeError):
    """No task is ready and no timer is set, so that every task would wait forever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0 and advances only while every task waits.

    A wait that cannot end raises a `DeadlockError`.
    """

    def __init__(self) -> None:
        self._clock = _Clock(lambda: _waiting(self))
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._clock.now

    def run_in_executor(self, *_: object) -> NoReturn:
        """Raise a RuntimeError, because a thread takes real time."""
        raise RuntimeError("Virtual time supports no threads.")

    async def subprocess_exec(self, *_: object, **__: object) -> NoReturn:
        """Raise a RuntimeError, because a process takes real time."""
        raise RuntimeError("Virtual time supports no processes.")

    subprocess_shell = subprocess_exec


class _Clock(selectors.BaseSelector):
    """A selector that advances the clock when the loop calls `select` to sleep."""

    def __init__(self, waiting: Callable[[], str]) -> None:
        self.now = 0.0
        self._waiting = waiting
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by `timeout`; no file is ever ready to be read or written."""
        if timeout is None:
            raise DeadlockError(
                f"At {format_duration(self.now)} of virtual time no task is ready and no timer is set, "
                f"so the loop would wait forever. {self._waiting()}"
            )
        self.now += timeout
        if timeout > 0 and math.ulp(self.now) > _RESOLUTION_S:
            # A loop runs timers due before now plus its resolution, but this sum rounds to now.
            self.now += 2 * math.ulp(self.now)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Accept the loop's own wake-up pipe, which is never used; refuse every other file."""
        if self._keys:
            raise RuntimeError("Virtual time supports no input or output.")
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time, then cancel the remaining tasks."""
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
