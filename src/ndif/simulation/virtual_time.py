"""An event loop in which waiting takes no time: where it would sleep, its clock jumps to the next timer.

What runs on it is ordinary asyncio code, as long as all it waits for is timers and other code on the same
loop. Input and output, threads and processes are refused: they take time that this clock knows nothing of.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_MOST_NAMED = 5
_RESOLUTION_S = time.get_clock_info("monotonic").resolution
"""Of every event loop: what lies closer together is one moment to it."""


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: whatever still waits would wait for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0 and passes only while everything waits.

    Raises:
        DeadlockError: from `run_until_complete` and `run_forever`, where nothing could ever go on.
    """

    def __init__(self) -> None:
        self._clock = _Clock(lambda: _waiting(self))
        super().__init__(self._clock)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._clock.now

    def run_in_executor(self, *_: object) -> NoReturn:
        """Refuse: a thread takes real time.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("There are no threads in virtual time.")

    async def subprocess_exec(self, *_: object, **__: object) -> NoReturn:
        """Refuse: so does a process.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("There are no processes in virtual time.")

    subprocess_shell = subprocess_exec


class _Clock(selectors.BaseSelector):
    """In the place of the system's selector: `select` is what a loop calls when it would sleep."""

    def __init__(self, waiting: Callable[[], str]) -> None:
        self.now = 0.0
        self._waiting = waiting
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let that much time pass; nothing is ever ready to be read or written."""
        if timeout is None:
            raise DeadlockError(
                f"At {self.now:g} s of virtual time nothing is ready and no timer is set, "
                f"so this would never go on. {self._waiting()}"
            )
        self.now += timeout
        if timeout > 0 and math.ulp(self.now) > _RESOLUTION_S:
            # A loop runs what is due before now and its resolution, which so large a number swallows.
            self.now += 2 * math.ulp(self.now)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Note the loop's own pipe, which wakes it from a sleep that never is; refuse all else."""
        if self._keys:
            raise RuntimeError("There is no input or output in virtual time.")
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget it."""
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """What is registered."""
        return self._keys


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time; what it leaves behind is cancelled.

    Raises:
        DeadlockError: if it could never end.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            loop.run_until_complete(_end())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


async def _end() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in sorted(left, key=lambda task: task.get_name()):
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    names = sorted(task.get_name() for task in asyncio.all_tasks(loop))
    if len(names) > _MOST_NAMED:
        names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} more"]
    return f"These wait: {', '.join(names)}." if names else "No task is left."
