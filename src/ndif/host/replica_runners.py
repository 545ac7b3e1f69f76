"""The runners of one replica, and the weights that they may share."""

from __future__ import annotations

import asyncio
import logging

from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.host.model_process import MAX_EXIT_S, ModelProcess, ModelProcessError
from ndif.host.port import ReplicaEvictedError, ReplicaLostError
from ndif.host.runner_handle import RunnerEndedError, RunnerError, RunnerHandle
from ndif.host.runner_pool import (
    FreshRunners,
    PersistentRunner,
    PerUserRunners,
    RunnerPool,
    scope_of,
)
from ndif.schema.request import Request
from ndif.tasks import end

logger = logging.getLogger(__name__)


class ReplicaRunners:
    """The runners of one replica, which isolate requests from each other.

    Owns the pools, and the verification of weights that runners share. Trusted requests run on a *kept*
    runner, others on a *fresh* one or on the runner of their key. `ModelProcess` forks the runners;
    `RequestRun` uses them. Guarantees that when `acquire` returns a runner, the weights are as they were
    loaded, and no untrusted process is left beside a trusted request.
    """

    def __init__(self, process: ModelProcess, settings: Settings, *, untrusted: bool) -> None:
        """Prepare the pools; `untrusted`: untrusted requests may come."""
        self.may_fork = True
        """False from `evict` to `start`: no process is forked for a request."""
        self.unavailable = "the replica has not been started"
        """Reason why no request may run here; empty if one may."""
        self._process = process
        self._max_users = settings.runner_users
        self._per_user = scope_of(settings) == "user"
        """True if a confined runner serves consecutive requests of one key."""
        self._kept = PersistentRunner(lambda: self._fork(fresh=False))
        self._fresh = PerUserRunners(
            FreshRunners(lambda: self._fork(fresh=True), settings.runner_pool),
            settings.runner_idle_s,
            settings.runner_max_requests,
        )
        self._first: RunnerPool = self._fresh if untrusted else self._kept
        self._acquiring = asyncio.Lock()
        """Held during `acquire`, which may outlast its request."""
        self._verifying: asyncio.Task[None] | None = None
        self._last_untrusted: RunnerHandle | None = None
        """The untrusted runner that served last and may have written to the weights since then."""

    async def start(self) -> None:
        """Start the first runners and admit requests; raise a `ModelProcessError` if none starts."""
        self.may_fork = True
        # Runners that share weights on GPUs could write to them.
        self._fresh.most = 1 if self._process.exposes_weights else self._max_users
        before = self._process.lines
        try:
            await self._first.start()
        except RunnerEndedError as error:
            last_words = await self._process.last_words(before)
            raise ModelProcessError(f"{error}; its last words: {last_words}") from error
        except RunnerError as error:
            raise ModelProcessError(str(error)) from error
        self.unavailable = ""

    def evict(self, why: str) -> None:
        """Stop forking for requests; `why` is the reason that later requests get."""
        self.may_fork = False
        # If the process has ended by itself, its request was lost, not evicted.
        if not self._process.ended.is_set():
            self.unavailable = why

    async def _fork(self, *, fresh: bool) -> RunnerHandle:
        if not self.may_fork:
            raise ModelProcessError(self.unavailable)
        if not fresh and self._process.is_confined:
            # The user was not trusted yet when the model was loaded. The next process is not confined.
            self._process.kill()
            raise ModelProcessError("the model is loaded again for users who are trusted")
        return await self._process.fork(fresh=fresh, reused=fresh and self._per_user)

    async def acquire(self, request: Request, stopped: asyncio.Future[str]) -> RunnerHandle | None:
        """Return a runner without state of other requests; None once the request is `stopped`.

        Raise a `ModelProcessError` or a `RunnerError` if there is none.
        """
        runners = self._pool(trusted=request.trusted)
        async with self._acquiring:
            if stopped.done():
                return None
            await self._wait_until_verified()
            if request.trusted:
                # No untrusted process may be left beside a trusted request.
                await self._fresh.end_all()
            runner = await runners.acquire(request.key if self._per_user else "")
            await self._verify_after(None if request.trusted else runner)
            if not stopped.done():
                return runner
            runners.release(runner, answered=False)
            return None

    def release(self, runner: RunnerHandle, *, trusted: bool, answered: bool) -> None:
        """Take back a runner after its request; see `RunnerPool.release`."""
        self._pool(trusted=trusted).release(runner, answered=answered)
        if self._process.exposes_weights:
            verifying = self._verify(runner, trusted=trusted)
            self._verifying = asyncio.create_task(verifying, name="weights")

    def lost(self, why: str) -> ReplicaLostError:
        """Return the error of a request whose replica was evicted, or was lost because of `why`."""
        return ReplicaEvictedError(self.unavailable) if self.unavailable else ReplicaLostError(why)

    async def wait_until_reset(self, *, trusted: bool) -> bool:
        """Wait until the last runner is reset; return False if none is left or it cannot be reset."""
        return await (self._kept if trusted else self._fresh).wait_until_reset()

    @property
    def is_verifying(self) -> bool:
        """Return True while the weights are verified after a run; False once a request waits."""
        return self._verifying is not None and not self._verifying.done()

    async def clear(self) -> None:
        """End all runners and restore the weights while no request runs. `start` starts runners again."""
        async with self._acquiring:
            await asyncio.gather(self._kept.clear(), self._fresh.clear())
        await self._wait_until_verified()
        await self._verify_after(None)

    async def close(self) -> None:
        """Wait for resets and end the verification, after the model process has ended."""
        await asyncio.gather(self._kept.wait_until_reset(), self._fresh.wait_until_reset())
        if self._verifying is not None:
            await end([self._verifying])

    def _pool(self, *, trusted: bool) -> RunnerPool:
        return self._kept if trusted else self._fresh

    async def _verify(self, runner: RunnerHandle, *, trusted: bool) -> None:
        """Restore the weights that a runner shared; end the replica if the runner does not exit."""
        # An untrusted runner may write until it has ended or is paused; a trusted one has no reason to.
        if await self.wait_until_reset(trusted=trusted):
            self._last_untrusted = None if trusted else runner
            if not trusted:
                runner.pause()
        else:
            self._last_untrusted = None
            await runner.exit_code(MAX_EXIT_S)
            if runner.alive:
                self._process.kill()
                raise ModelProcessError(
                    f"a runner could not be ended within {format_duration(MAX_EXIT_S)}"
                )
        await self._restore()

    async def _verify_after(self, runner: RunnerHandle | None) -> None:
        """Verify the weights again, unless the `runner` after which they were verified serves next."""
        last = self._last_untrusted
        if last is not None and last is not runner:
            self._last_untrusted = None
            await self._restore()

    async def _restore(self) -> None:
        if restored := await self._process.verify():
            logger.warning("a request had changed %d of the weights; they are restored", restored)

    async def _wait_until_verified(self) -> None:
        verifying, self._verifying = self._verifying, None
        if verifying is not None:
            await verifying
