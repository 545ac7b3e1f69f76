"""Runner pools: one persistent runner, fresh runners, or one runner per user."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.host.channel import ProtocolError
from ndif.host.runner_handle import RunnerError, RunnerHandle
from ndif.stores.memory import memory_is_short
from ndif.tasks import within

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 120.0
_RESET_TIMEOUT_S = 10.0
"""Seconds that a runner may take to reset itself after a request."""
_STOPPED_AFTER_S = 1.0
"""Seconds without a request before a user's runner is paused; the next trace often arrives sooner."""
_EXIT_TIMEOUT_S = 30.0
"""Seconds that a killed process may take to end."""
_DELIVERY_S = 0.01
"""Seconds that a result takes to reach a nearby client."""

_WEIGHT_OWNER = 1
_PERSISTENT_RUNNERS = 2
"""The runner of trusted requests and the spare one (`PersistentRunner`)."""

Fork = Callable[[], Awaitable[RunnerHandle]]
"""Forks a new runner. Raises `ModelProcessError` if the model's process has ended."""


def scope_of(settings: Settings) -> Literal["request", "user"]:
    """Return the scope of an untrusted runner; dev mode has no keys and thus no users to distinguish."""
    return "request" if settings.dev_mode else settings.runner_scope


def context_bytes(settings: Settings, *, untrusted: bool, trusted: bool) -> int:
    """Return the memory of one replica's CUDA contexts on each of its GPUs.

    A context is the GPU memory that a process takes before its first tensor. The sum covers the weight
    owner, the pool of untrusted runners, the runner kept for a key, and, if trusted requests may come, the
    persistent runners.
    """
    per_key = scope_of(settings) == "user"
    runners = (settings.runner_pool + per_key) * untrusted + _PERSISTENT_RUNNERS * trusted
    return (_WEIGHT_OWNER + runners) * settings.gpu_context_bytes


class RunnerPool(Protocol):
    """A source of runners."""

    async def start(self) -> None:
        """Start the first runners and wait until they are ready, or raise a `RunnerError`."""

    async def acquire(self, key: str) -> RunnerHandle:
        """Return a runner for one request; `key` is the digest of its API key, empty without one."""

    def release(self, runner: RunnerHandle, *, answered: bool) -> None:
        """Take back a runner after its request; `answered`: it sent its last frame and was not killed."""

    async def clear(self) -> None:
        """End all runners while no request runs. `start` starts the first runners again."""


class PersistentRunner:
    """A pool that serves all trusted requests with one runner and forks a spare ahead of need.

    The runner resets its model after each request. When it fails or cannot be reset, the spare takes its
    place.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._runner: RunnerHandle | None = None
        self._spare: RunnerHandle | None = None
        self._reset: asyncio.Task[bool] | None = None

    async def start(self) -> None:
        self._runner = await self._fork()
        # Two runners that warm up at once each take twice as long.
        await self._runner.ready()
        self._spare = await self._fork()

    async def acquire(self, key: str) -> RunnerHandle:
        await self.wait_until_reset()
        return await self._fill()

    async def _fill(self) -> RunnerHandle:
        """Replace an ended runner and a missing spare; return the runner."""
        if self._runner is None or not self._runner.usable:
            if self._runner is not None:
                self._runner.channel.close()
            self._runner, self._spare = self._spare, None
        if self._runner is None or not self._runner.usable:
            self._runner = await self._fork()
        if self._spare is None or not self._spare.usable:
            self._spare = await self._fork()
        return self._runner

    def release(self, runner: RunnerHandle, *, answered: bool) -> None:
        """See `RunnerPool.release`. The runner stays if it can be reset."""
        if not answered:
            runner.kill()
        self._reset = asyncio.create_task(self._await_reset(runner), name="runner reset")

    async def _await_reset(self, runner: RunnerHandle) -> bool:
        if runner.usable and await _is_reset(runner):
            return True
        runner.kill()
        await runner.exit_code(_EXIT_TIMEOUT_S)
        # No caller waits for this task; a process that has ended fails the next request.
        with contextlib.suppress(Exception):
            await self._fill()
        return False

    async def wait_until_reset(self) -> bool:
        """Wait for the last runner's reset; return False if there is none or it failed."""
        if (reset := self._reset) is None:
            return False
        await asyncio.wait([reset])
        return not reset.cancelled() and reset.result()

    async def clear(self) -> None:
        if self._reset is not None:
            self._reset.cancel()
        await self.wait_until_reset()
        for runner in (self._runner, self._spare):
            if runner is not None:
                _discard(runner)
        self._runner = self._spare = self._reset = None


class FreshRunners:
    """A pool that serves each untrusted request with its own process, forked and confined ahead of need."""

    def __init__(self, fork: Fork, size: int) -> None:
        self._fork = fork
        self._size = size
        self._waiting: deque[RunnerHandle] = deque()
        self._refilling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `RunnerPool.start`. Only the first runner is awaited; the others are forked afterwards."""
        await self._fill(1)
        self._refill_soon()

    async def _fill(self, size: int) -> None:
        """Fork runners, one at a time, until `size` wait."""
        for runner in [runner for runner in self._waiting if not runner.alive]:
            self._waiting.remove(runner)
            runner.channel.close()
        while len(self._waiting) < size:
            self._waiting.append(await self._fork_ready())

    async def acquire(self, key: str) -> RunnerHandle:
        while self._waiting:
            runner = self._waiting.popleft()
            if runner.alive:
                return runner
            runner.channel.close()
        return await self._fork_ready()

    def release(self, runner: RunnerHandle, *, answered: bool) -> None:
        """See `RunnerPool.release`. The runner ends, and a replacement is forked.

        The fork waits for the end of the request and for the delivery of the result: the warm-up would
        take their cores.
        """
        _discard(runner)
        self._refill_soon()

    def _refill_soon(self) -> None:
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._refill(), name="runner pool")

    async def _refill(self) -> None:
        await asyncio.sleep(_DELIVERY_S)
        # No caller waits for this task; a process that has ended fails the next request.
        with contextlib.suppress(Exception):
            await self._fill(self._size)

    async def clear(self) -> None:
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.wait([self._refilling])
        while self._waiting:
            _discard(self._waiting.popleft())

    async def _fork_ready(self) -> RunnerHandle:
        runner = await self._fork()
        try:
            await within(runner.ready(), _READY_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            _discard(runner)
            raise RunnerError(
                f"a runner was not ready within {format_duration(_READY_TIMEOUT_S)}"
            ) from error
        except BaseException:
            _discard(runner)
            raise
        return runner


@dataclass(eq=False)
class _UserRunner:
    key: str
    """Digest of the API key; empty for a request without one."""
    runner: RunnerHandle
    served: int = 1
    """Number of requests so far, the running one included."""
    reset: asyncio.Task[bool] | None = None
    """The reset after its last request; None while a request runs."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    ended: bool = False

    def cancel_timers(self) -> None:
        """Cancel the timers that pause and end an idle runner."""
        while self.timers:
            self.timers.pop().cancel()


class PerUserRunners:
    """A pool that serves consecutive requests of one API key with the same confined runner.

    Owns the runners of the last `most` keys, fewer if memory is short. Each runs a request, resets itself,
    and is paused if the key's next request does not come soon. Takes runners from `FreshRunners` and hands
    each back to be ended. A runner ends after `idle_s`, after `max_requests`, after a failed reset, and
    after a request without a key or an answer. The least recently used runner ends if another key needs its
    place. A runner that has served one key never serves another.
    """

    def __init__(
        self,
        fresh: FreshRunners,
        idle_s: float,
        max_requests: int,
        most: int = 1,
        is_short: Callable[[], bool] = memory_is_short,
    ) -> None:
        """Prepare a pool without runners; `is_short` returns True if memory is short."""
        self._is_short = is_short
        self.most = most
        """Number of keys whose runners are kept; at most one of them runs."""
        self._fresh = fresh
        self._idle_s = idle_s
        self._max_requests = max_requests
        self._users: dict[str, _UserRunner] = {}
        """Runners by key, the least recently used first."""
        self._last: _UserRunner | None = None
        self._leaving: list[RunnerHandle] = []
        """Runners that served a key and were killed; their processes may not have ended yet."""

    async def start(self) -> None:
        await self._fresh.start()

    async def acquire(self, key: str) -> RunnerHandle:
        """See `RunnerPool.acquire`. Raise a `RunnerError` if a process does not end in time."""
        user = self._users.pop(key, None)
        if user is not None:
            user.cancel_timers()
            if self._admits_another(user) and await _was_reset(user):
                user.cancel_timers()  # the reset has set the timer that pauses the runner
                user.served += 1
                user.reset = None
                user.runner.resume()
                return self._mark_last(user)
            await self._end_after_reset(user)
        while len(self._users) >= self.most or (self._users and self._is_short()):
            await self._end_after_reset(next(iter(self._users.values())))
        await self._wait_for_exits()
        return self._mark_last(_UserRunner(key, await self._fresh.acquire(key)))

    def _mark_last(self, user: _UserRunner) -> RunnerHandle:
        self._users[user.key] = self._last = user
        return user.runner

    def _admits_another(self, user: _UserRunner) -> bool:
        return bool(user.key) and user.served < self._max_requests

    async def wait_until_reset(self) -> bool:
        """Wait until the last runner is reset; return False if none is left or it cannot be reset."""
        return self._last is not None and await _was_reset(self._last)

    def release(self, runner: RunnerHandle, *, answered: bool) -> None:
        user = next(candidate for candidate in self._users.values() if candidate.runner is runner)
        if not answered or not self._admits_another(user):
            self._end(user)
            return
        user.reset = asyncio.create_task(self._await_reset(user), name="runner reset")
        loop = asyncio.get_running_loop()
        user.timers.append(loop.call_later(self._idle_s, self._end_idle, user))

    async def _await_reset(self, user: _UserRunner) -> bool:
        if not await _is_reset(user.runner):
            self._end(user)
            return False
        # A stopped process runs none of its user's threads.
        loop = asyncio.get_running_loop()
        user.timers.append(loop.call_later(_STOPPED_AFTER_S, user.runner.pause))
        return True

    def _end_idle(self, user: _UserRunner) -> None:
        if user.reset is not None and not user.reset.done():
            user.runner.kill()  # this also ends the reset
        else:
            self._end(user)

    def _end(self, user: _UserRunner) -> None:
        """End a runner and fork another in its place."""
        if user.ended:
            return
        user.ended = True
        user.cancel_timers()
        if self._users.get(user.key) is user:
            del self._users[user.key]
        if user.key:
            self._leaving.append(user.runner)
        self._fresh.release(user.runner, answered=False)

    async def _end_after_reset(self, user: _UserRunner) -> None:
        """End a runner and any reset in progress."""
        if user.reset is not None and not user.reset.done():
            user.reset.cancel()
            await asyncio.wait([user.reset])
        self._end(user)

    async def end_all(self) -> None:
        """End the runners of all keys and wait for their exits; raise as `acquire` does."""
        for user in list(self._users.values()):
            await self._end_after_reset(user)
        await self._wait_for_exits()

    async def _wait_for_exits(self) -> None:
        while self._leaving:
            runner = self._leaving[-1]
            await runner.exit_code(_EXIT_TIMEOUT_S)
            if runner.alive:
                raise RunnerError(
                    f"a runner had not ended {format_duration(_EXIT_TIMEOUT_S)} after it was killed"
                )
            self._leaving.remove(runner)

    async def clear(self) -> None:
        await self.end_all()
        await self._fresh.clear()


async def _was_reset(user: _UserRunner) -> bool:
    """Wait until a runner is reset; return False if it cannot be reset, has ended, or runs a request."""
    if user.reset is None:
        return False
    await asyncio.wait([user.reset])
    return not user.reset.cancelled() and user.reset.result() and user.runner.usable


async def _is_reset(runner: RunnerHandle) -> bool:
    """Wait until a runner has reset itself after a request; return False if it cannot be reset."""
    try:
        await within(runner.ready(), _RESET_TIMEOUT_S)
    except (RunnerError, ProtocolError, asyncio.TimeoutError, OSError) as error:
        logger.debug("a runner cannot be reset and ends: %s", error)
        return False
    return True


def _discard(runner: RunnerHandle) -> None:
    runner.kill()
    runner.channel.close()
