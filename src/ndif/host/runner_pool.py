"""The pools that runners come from: one persistent runner, fresh ones, or one for each user in turn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.host.channel import ProtocolError
from ndif.host.runner_handle import RunnerError, RunnerHandle
from ndif.tasks import within

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 120.0
_RESET_TIMEOUT_S = 10.0
"""Seconds that a runner may take to reset itself after a request."""
_EXIT_TIMEOUT_S = 30.0
"""Seconds that a killed process may take to end."""
_DELIVERY_S = 0.01
"""Seconds that a result takes to reach a nearby client."""

_WEIGHT_OWNER = 1
_PERSISTENT_RUNNERS = 2
"""The runner of trusted requests and the spare one (`PersistentRunner`)."""

Fork = Callable[[], Awaitable[RunnerHandle]]
"""Forks a new runner. Raises `ModelProcessError` if the model's process has ended."""


def context_bytes(settings: Settings, *, untrusted: bool, trusted: bool) -> int:
    """Return the memory of one replica's CUDA contexts on each of its GPUs.

    A context is the GPU memory that a process takes before its first tensor. The sum counts the weight
    owner, the runners that wait or run for untrusted requests, the one that a key has for itself, and the
    persistent ones, where trusted requests may come.
    """
    per_key = settings.runner_scope != "request"
    runners = (settings.runner_pool + per_key) * untrusted + _PERSISTENT_RUNNERS * trusted
    return (_WEIGHT_OWNER + runners) * settings.gpu_context_bytes


class RunnerPool(Protocol):
    """A source of runners."""

    async def start(self) -> None:
        """Start the first runners and wait until they are ready, or raise a `RunnerError`."""

    async def acquire(self, key: str) -> RunnerHandle:
        """Return a runner for one request of the API key whose digest is `key`; empty for no key."""

    def release(self, runner: RunnerHandle, *, answered: bool) -> None:
        """Return a runner after its request; `answered` if it sent its last frame and was not killed."""

    async def clear(self) -> None:
        """End all runners; no request may run. `start` starts the first ones again."""


class PersistentRunner:
    """Serve all trusted requests with one runner; a spare one is forked ahead of need.

    The runner resets its model after each request. When it fails or cannot be reset, the spare takes its
    place.
    """

    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self._runner: RunnerHandle | None = None
        self._spare: RunnerHandle | None = None
        self._reset: asyncio.Task[bool] | None = None

    async def start(self) -> None:
        """See `RunnerPool.start`."""
        self._runner = await self._fork()
        # Two runners that warm up at once each take twice as long.
        await self._runner.ready()
        self._spare = await self._fork()

    async def acquire(self, key: str) -> RunnerHandle:
        """See `RunnerPool.acquire`."""
        await self.wait_until_reset()
        return await self._fill()

    async def _fill(self) -> RunnerHandle:
        """Replace a runner that has ended, and a spare one that is missing; return the runner."""
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
        """Wait until the last runner is reset; return False if it was ended because it cannot be."""
        if (reset := self._reset) is None:
            return False
        await asyncio.wait([reset])
        return not reset.cancelled() and reset.result()

    async def clear(self) -> None:
        """See `RunnerPool.clear`."""
        if self._reset is not None:
            self._reset.cancel()
        await self.wait_until_reset()
        for runner in (self._runner, self._spare):
            if runner is not None:
                _discard(runner)
        self._runner = self._spare = self._reset = None


class FreshRunners:
    """Serve each untrusted request with a process of its own, forked and confined ahead of need."""

    def __init__(self, fork: Fork, size: int) -> None:
        self._fork = fork
        self._size = size
        self._waiting: deque[RunnerHandle] = deque()
        self._refilling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `RunnerPool.start`."""
        for runner in [runner for runner in self._waiting if not runner.alive]:
            self._waiting.remove(runner)
            runner.channel.close()
        while len(self._waiting) < self._size:
            self._waiting.append(await self._new())

    async def acquire(self, key: str) -> RunnerHandle:
        """See `RunnerPool.acquire`."""
        while self._waiting:
            runner = self._waiting.popleft()
            if runner.alive:
                return runner
            runner.channel.close()
        return await self._new()

    def release(self, runner: RunnerHandle, *, answered: bool) -> None:
        """See `RunnerPool.release`. The runner ends, and another is forked in its place.

        A runner that warmed up during the request would take its cores. After the request the fork still
        waits a moment, because the delivery of the result needs them.
        """
        _discard(runner)
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._refill(), name="runner pool")

    async def _refill(self) -> None:
        await asyncio.sleep(_DELIVERY_S)
        # No caller waits for this task; a process that has ended fails the next request.
        with contextlib.suppress(Exception):
            await self.start()

    async def clear(self) -> None:
        """See `RunnerPool.clear`."""
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.wait([self._refilling])
        while self._waiting:
            _discard(self._waiting.popleft())

    async def _new(self) -> RunnerHandle:
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


class PerUserRunners:
    """Serve one API key's requests in a row with the same confined runner.

    Owns the runner of the last key: it runs a request, resets itself, or is stopped until the same key's
    next request. Takes runners from `FreshRunners` and returns each to be ended: when another key comes,
    when `idle_s` is over, after `max_requests`, when the runner cannot be reset, and after each request
    without a key or an answer. A runner that has served one key never serves another.
    """

    def __init__(self, fresh: FreshRunners, idle_s: float, max_requests: int) -> None:
        self._fresh = fresh
        self._idle_s = idle_s
        self._max_requests = max_requests
        self._runner: RunnerHandle | None = None
        self._key, self._served = "", 0
        """The last API key, and its requests to the same runner so far, with the running one."""
        self._leaving: RunnerHandle | None = None
        """A runner that served a key and was killed; its process may not have ended yet."""
        self._reset: asyncio.Task[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """See `RunnerPool.start`."""
        await self._fresh.start()

    async def acquire(self, key: str) -> RunnerHandle:
        """See `RunnerPool.acquire`. Raise a `RunnerError` if another key's runner does not end in time."""
        self._stop_timer()
        if key == self._key and self._admits_another() and await self.wait_until_reset():
            assert self._runner is not None  # noqa: S101 - an idle runner exists
            self._served += 1
            self._reset = None
            self._runner.resume()
            return self._runner
        await self.end_last_runner()
        runner = await self._fresh.acquire(key)
        self._runner, self._key, self._served = runner, key, 1
        return runner

    def _admits_another(self) -> bool:
        """Return True if another request of the last key may be the next one on its runner."""
        return bool(self._key) and self._served < self._max_requests

    async def wait_until_reset(self) -> bool:
        """Wait until the last runner is reset; return False if none is left or it cannot be reset."""
        if (reset := self._reset) is None:
            return False
        await asyncio.wait([reset])
        is_reset = not reset.cancelled() and reset.result()
        return is_reset and self._runner is not None and self._runner.usable

    def release(self, runner: RunnerHandle, *, answered: bool) -> None:
        """See `RunnerPool.release`."""
        if not answered or not self._admits_another():
            self._end(runner)
            return
        self._reset = asyncio.create_task(self._await_reset(runner), name="runner reset")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._idle_s, self._end_idle, runner)

    async def _await_reset(self, runner: RunnerHandle) -> bool:
        if not await _is_reset(runner):
            self._end(runner)
            return False
        # A stopped process runs none of its user's threads.
        runner.pause()
        return True

    def _end_idle(self, runner: RunnerHandle) -> None:
        if self._reset is not None and not self._reset.done():
            runner.kill()  # this also ends the reset
        else:
            self._end(runner)

    def _end(self, runner: RunnerHandle) -> None:
        """End `runner` and fork another in its place."""
        if runner is not self._runner:
            return
        self._stop_timer()
        self._runner = None
        self._leaving = runner if self._key else None
        self._fresh.release(runner, answered=False)

    async def end_last_runner(self) -> None:
        """End the last key's runner and wait for its end; raise a `RunnerError` if that takes too long."""
        reset, self._reset = self._reset, None
        if reset is not None and not reset.done():
            reset.cancel()
            await asyncio.wait([reset])
        if self._runner is not None:
            self._end(self._runner)
        if self._leaving is not None:
            await self._leaving.exit_code(_EXIT_TIMEOUT_S)
            if self._leaving.alive:
                raise RunnerError(
                    f"a runner had not ended {format_duration(_EXIT_TIMEOUT_S)} after it was killed"
                )
            self._leaving = None

    async def clear(self) -> None:
        """See `RunnerPool.clear`."""
        await self.end_last_runner()
        await self._fresh.clear()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


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
