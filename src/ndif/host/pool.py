"""Where the runner of a request comes from: one that is kept, or one of those that wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from ndif.host.runner import Runner, RunnerError
from ndif.tasks import within

_PATIENCE_S = 120.0
_DELIVERY_S = 0.01
"""How long a result is on its way to a client that is near."""

Fork = Callable[[], Awaitable[Runner]]
"""A new runner. Raises `ModelProcessError` where the model's process is gone."""


class Runners(Protocol):
    """A supply of runners."""

    async def start(self) -> None:
        """Have the first ones ready.

        Raises:
            RunnerError: if they cannot be.
        """
        ...

    async def take(self) -> Runner:
        """A runner for one request."""
        ...

    def give_back(self, runner: Runner) -> None:
        """The request is over."""
        ...

    async def empty(self) -> None:
        """End all that there are; `start` has the first ones ready again. No request may run."""
        ...


class Kept:
    """For trusted code: one runner that serves on until it fails, and another forked ahead of need."""

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._runner: Runner | None = None
        self._spare: Runner | None = None

    async def start(self) -> None:
        """See `Runners.start`."""
        self._runner = await self._fork()
        # Two runners that warm up at once are each twice as long at it.
        await self._runner.ready()
        self._spare = await self._fork()

    async def take(self) -> Runner:
        """See `Runners.take`."""
        if self._runner is None or not self._runner.serves:
            if self._runner is not None:
                self._runner.close()
            self._runner, self._spare = self._spare, None
        if self._runner is None or not self._runner.serves:
            self._runner = await self._fork()
        if self._spare is None or not self._spare.serves:
            self._spare = await self._fork()
        return self._runner

    def give_back(self, runner: Runner) -> None:
        """See `Runners.give_back`. It stays."""

    async def empty(self) -> None:
        """See `Runners.empty`."""
        for runner in (self._runner, self._spare):
            if runner is not None:
                _discard(runner)
        self._runner = self._spare = None


class Fresh:
    """For untrusted code: every request has a process of its own, which waits for it confined."""

    def __init__(self, fork: Fork, size: int) -> None:
        self._fork = fork
        self._size = size
        self._waiting: deque[Runner] = deque()
        self._refilling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `Runners.start`."""
        for runner in [runner for runner in self._waiting if not runner.alive]:
            self._waiting.remove(runner)
            runner.close()
        while len(self._waiting) < self._size:
            self._waiting.append(await self._new())

    async def take(self) -> Runner:
        """See `Runners.take`."""
        while self._waiting:
            runner = self._waiting.popleft()
            if runner.alive:
                return runner
            runner.close()
        return await self._new()

    def give_back(self, runner: Runner) -> None:
        """See `Runners.give_back`. It ends, and another takes its place in the line.

        Not before: who warms up beside a request that runs takes its cores. And not quite yet: those who
        carry the result to its client need them.
        """
        _discard(runner)
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._refill(), name="runner pool")

    async def _refill(self) -> None:
        await asyncio.sleep(_DELIVERY_S)
        # A process that is gone says so to the next request; nobody waits for this.
        with contextlib.suppress(Exception):
            await self.start()

    async def empty(self) -> None:
        """See `Runners.empty`."""
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.wait([self._refilling])
        while self._waiting:
            _discard(self._waiting.popleft())

    async def _new(self) -> Runner:
        runner = await self._fork()
        try:
            await within(runner.ready(), _PATIENCE_S)
        except asyncio.TimeoutError as error:
            _discard(runner)
            raise RunnerError(f"a runner was not ready within {_PATIENCE_S:g} s") from error
        except BaseException:
            _discard(runner)
            raise
        return runner


def _discard(runner: Runner) -> None:
    runner.kill()
    runner.close()
