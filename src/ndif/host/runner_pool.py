"""Where the runner of a request comes from: one that is kept, or one of those that wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from ndif.host.channel import ProtocolError
from ndif.host.runner import Runner, RunnerError
from ndif.tasks import within

logger = logging.getLogger(__name__)

_PATIENCE_S = 120.0
_RESET_S = 10.0
"""Seconds that a runner may take to reset itself after a request."""
_GONE_S = 30.0
"""Seconds that a killed process may take to be gone."""
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

    async def take(self, key: str) -> Runner:
        """Return a runner for one request of the API key whose digest is `key`; empty for no key."""
        ...

    def give_back(self, runner: Runner, *, answered: bool) -> None:
        """End the request. `answered`: `runner` sent its last frame and was not killed for it."""
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

    async def take(self, key: str) -> Runner:
        """See `Runners.take`."""
        if self._runner is None or not self._runner.usable:
            if self._runner is not None:
                self._runner.close()
            self._runner, self._spare = self._spare, None
        if self._runner is None or not self._runner.usable:
            self._runner = await self._fork()
        if self._spare is None or not self._spare.usable:
            self._spare = await self._fork()
        return self._runner

    def give_back(self, runner: Runner, *, answered: bool) -> None:
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

    async def take(self, key: str) -> Runner:
        """See `Runners.take`."""
        while self._waiting:
            runner = self._waiting.popleft()
            if runner.alive:
                return runner
            runner.close()
        return await self._new()

    def give_back(self, runner: Runner, *, answered: bool) -> None:
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


@dataclass(frozen=True, slots=True)
class Tenure:
    """One key's hold on a runner."""

    key: str
    served: int = 1
    """Requests, with the one that runs."""

    def admits(self, key: str, max_requests: int) -> bool:
        """Return True if a request of `key` may be the next one on the same runner."""
        return bool(key) and key == self.key and self.served < max_requests


class PerUser:
    """Confined runners, each of which serves one key's requests in a row.

    Owns the runner of the last key that has one: running a request, resetting itself, or stopped until the
    same key's next request. Takes runners from `Fresh`, and gives each back to be ended: when another key
    comes, when `idle_s` is over, after `max_requests`, when the runner says that it cannot be reset, and
    after each request that has no key or no answer. A runner that has served one key never serves another.
    """

    def __init__(self, fresh: Fresh, idle_s: float, max_requests: int) -> None:
        self._fresh = fresh
        self._idle_s = idle_s
        self._max_requests = max_requests
        self._runner: Runner | None = None
        self._tenure = Tenure("")
        self._leaving: Runner | None = None
        """A runner that served a key and was ended; its process may still be there."""
        self._reset: asyncio.Task[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """See `Runners.start`."""
        await self._fresh.start()

    async def take(self, key: str) -> Runner:
        """See `Runners.take`.

        Raises:
            RunnerError: if the runner of another key does not end.
        """
        self._stop_timer()
        if self._tenure.admits(key, self._max_requests) and await self.idle():
            assert self._runner is not None  # noqa: S101 - it is idle
            self._tenure = Tenure(key, self._tenure.served + 1)
            self._reset = None
            self._runner.resume()
            return self._runner
        await self.part()
        runner = await self._fresh.take(key)
        self._runner, self._tenure = runner, Tenure(key)
        return runner

    async def idle(self) -> bool:
        """Wait until the last request's runner is reset; False if there is none, or it cannot be."""
        reset = self._reset
        if reset is None:
            return False
        await asyncio.wait([reset])
        if reset.cancelled() or not reset.result():
            return False
        return self._runner is not None and self._runner.usable

    def give_back(self, runner: Runner, *, answered: bool) -> None:
        """See `Runners.give_back`."""
        if not answered or not self._tenure.admits(self._tenure.key, self._max_requests):
            self._end(runner)
            return
        self._reset = asyncio.create_task(self._await_reset(runner), name="runner reset")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._idle_s, self._idled, runner)

    async def _await_reset(self, runner: Runner) -> bool:
        try:
            await within(runner.ready(), _RESET_S)
        except (RunnerError, ProtocolError, asyncio.TimeoutError, OSError) as error:
            logger.debug("a runner serves its user no longer: %s", error)
            self._end(runner)
            return False
        # A process that waits does nothing: no thread of its user's goes on.
        runner.pause()
        return True

    def _idled(self, runner: Runner) -> None:
        if self._reset is not None and not self._reset.done():
            runner.kill()  # its reset ends with it
        else:
            self._end(runner)

    def _end(self, runner: Runner) -> None:
        """End `runner`, and have another wait in its place."""
        if runner is not self._runner:
            return
        self._stop_timer()
        self._runner = None
        self._leaving = runner if self._tenure.key else None
        self._fresh.give_back(runner, answered=False)

    async def part(self) -> None:
        """End the last key's runner, and return once its process is gone.

        Raises:
            RunnerError: if it is not gone in time.
        """
        reset, self._reset = self._reset, None
        if reset is not None and not reset.done():
            reset.cancel()
            await asyncio.wait([reset])
        if self._runner is not None:
            self._end(self._runner)
        if self._leaving is None:
            return
        try:
            await within(self._leaving.gone(), _GONE_S)
        except asyncio.TimeoutError as error:
            raise RunnerError(f"a runner was not gone {_GONE_S:g} s after it was ended") from error
        self._leaving = None

    async def empty(self) -> None:
        """See `Runners.empty`."""
        await self.part()
        await self._fresh.empty()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def _discard(runner: Runner) -> None:
    runner.kill()
    runner.close()
