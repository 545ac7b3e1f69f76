"""One run of a request on a replica, from the search for a runner to the runner's return."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ndif.config.units import format_duration
from ndif.host.channel import ProtocolError
from ndif.host.execution import EXIT_PATIENCE_S, Exchange, Execution, announce
from ndif.host.hub import AdapterError, Adapters
from ndif.host.model_process import ModelProcess, ModelProcessError
from ndif.host.port import Respond
from ndif.host.replica_runners import ReplicaRunners
from ndif.host.runner_handle import RunnerError, RunnerHandle, describe_crash, describe_exit
from ndif.host.runner_protocol import LimitError, LimitReason, NoLiveClientError
from ndif.host.watchdogs import GpuWatch, ResourceWatchdog
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.memory import total_memory
from ndif.stores.objects import DiskError, MemoryFullError, ObjectStoreError
from ndif.telemetry.steps import step

logger = logging.getLogger(__name__)

_NOT_STORED = "The job ran, and its result could not be stored: {}. Send it again in a moment."
_UNREACHABLE = "this server cannot reach its object store"

_RUNNERS = 5
"""Runners that may end, one after the other, before a request's block begins."""
_CRASH = "crash"
"""Limit named in metrics for a run whose process ended by itself."""
_NOT_BEGUN = (
    f"{_RUNNERS} processes in a row ended before your block could begin in them: something on this server "
    "ends them. Send the job again, and tell its operator if that does not help."
)

_INTERRUPT_S = 3.0
"""Seconds that an interrupted block has to end."""


class _NotBegunError(Exception):
    """The runner ended before the block began, so that the request may run on the next one."""


@dataclass(frozen=True, slots=True)
class RunTools:
    """Parts of a replica that each of its runs uses."""

    process: ModelProcess
    runners: ReplicaRunners
    execution: Execution
    adapters: Adapters
    resources: ResourceWatchdog
    gpu_watch: GpuWatch | None


class RequestRun:
    """One run of one request.

    Owns the runner that serves the request, and the reason for an early end: the run's time is over, the
    client has left, or the request exceeds a limit. Gets a runner from `ReplicaRunners` and the response
    from an `Exchange`, and takes another runner if one ends before the block begins.
    """

    def __init__(self, tools: RunTools, held: Mapping[int, int], timeout_s: float) -> None:
        """Prepare a run that may take `timeout_s`, on a replica that has `held` bytes of each GPU."""
        self._tools = tools
        self._held = held
        self._timeout_s = timeout_s
        self._runner: RunnerHandle | None = None
        self._answered = False
        """True if the runner has sent its last frame and was not killed."""
        self._unreported_s = 0.0
        """Seconds for which untrusted runners had the request without an answer."""
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason why the run ends early."""

    @property
    def runner_pid(self) -> int | None:
        """Return the process id of the runner that serves now, or None."""
        return None if self._runner is None else self._runner.pid

    async def run(self, request: Request, respond: Respond) -> Response:
        """Run one request and return its terminal response; see `ModelActor.run`."""
        await announce(request, respond)
        reason = (
            f"The job ran longer than {format_duration(self._timeout_s)}, the most that this "
            "server allows (NDIF_EXECUTION_TIMEOUT_SECONDS), and was ended."
        )
        with self._limited(self._timeout_s, lambda: self._interrupt(LimitReason(reason, "time"))):
            for _ in range(_RUNNERS):
                with contextlib.suppress(_NotBegunError):
                    response = await self._serve(request, respond)
                    return self._with_limit(self._with_time(response))
        return Response(request.id, Status.ERROR, _NOT_BEGUN)

    def cancel(self, reason: str) -> None:
        """End the run; its request becomes an ERROR with `reason`."""
        if not self._stopped.done():
            self._stopped.set_result(reason)
        if self._runner is not None:
            self._runner.kill()

    def close(self) -> None:
        """Stop a search for a runner that outlasts the run."""
        if not self._stopped.done():
            self._stopped.set_result("")

    @property
    def _cancelled(self) -> str:
        """Return the reason why the run ends early; empty if it does not."""
        return self._stopped.result() if self._stopped.done() else ""

    @contextlib.contextmanager
    def _limited(self, seconds: float, on_timeout: Callable[[], None]) -> Iterator[None]:
        """Call `on_timeout` after `seconds`; re-raise process and runner errors as lost replicas."""
        timer = asyncio.get_running_loop().call_later(seconds, on_timeout)
        try:
            yield
        except (ModelProcessError, RunnerError) as error:
            raise self._tools.runners.lost(str(error)) from error
        finally:
            timer.cancel()

    async def _acquire(self, request: Request) -> RunnerHandle | None:
        """Return a runner, or None as soon as the run is stopped; the search then goes on in its task."""
        search = self._tools.runners.acquire(request, self._stopped)
        acquiring = asyncio.create_task(search, name="acquire a runner")
        acquiring.add_done_callback(lambda task: task.cancelled() or task.exception())
        futures: set[asyncio.Future[Any]] = {acquiring, self._stopped}
        with step("acquire"):
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return acquiring.result() if acquiring.done() else None

    @contextlib.asynccontextmanager
    async def _serving(self, runner: RunnerHandle, request: Request) -> AsyncIterator[None]:
        """Watch a runner while it serves a request, and then return it to its pool."""
        self._runner, self._answered = runner, False
        watching: list[asyncio.Task[None]] = []
        try:
            watching += await self._watchers(request, runner)
            yield
        finally:
            for task in watching:
                task.cancel()
            self._runner = None
            self._tools.runners.release(runner, trusted=request.trusted, answered=self._answered)

    async def _serve(self, request: Request, respond: Respond) -> Response:
        """Serve one request on a runner, or end the request as soon as the run is stopped."""
        runner = await self._acquire(request)
        if runner is None:
            return Response(request.id, Status.ERROR, self._cancelled)
        async with self._serving(runner, request):
            try:
                return await self._serve_on(runner, request, respond)
            except ProtocolError as error:
                runner.kill()
                # A block that was interrupted may have left half a frame.
                reason = self._cancelled or f"The runner broke its protocol and was ended: {error}."
                return Response(request.id, Status.ERROR, reason)
            except ObjectStoreError as error:
                logger.warning("request %s: its result is lost: %s", request.id, error)
                # The message of a remote store names its address, which is for the log only.
                is_shown = isinstance(error, DiskError | MemoryFullError)
                why = str(error) if is_shown else _UNREACHABLE
                return Response(request.id, Status.ERROR, _NOT_STORED.format(why))
            except LimitError as error:
                runner.kill()
                return Response(request.id, Status.ERROR, str(error), limit=error.limit)
            except (AdapterError, NoLiveClientError) as error:
                runner.kill()
                return Response(request.id, Status.ERROR, str(error))

    async def _serve_on(self, runner: RunnerHandle, request: Request, respond: Respond) -> Response:
        tools = self._tools
        # Where no untrusted request may come, the runner itself reaches the hub.
        fetches = request.names_adapter and tools.process.spec.untrusted is not None
        if fetches and not self._cancelled:
            fetching = tools.adapters.fetch(request.env, trusted=request.trusted)
            await runner.unless_ended(fetching)
        if self._cancelled:  # cancelled before a block ran
            return Response(request.id, Status.ERROR, self._cancelled)
        memory_bytes = max(total_memory(), *self._held.values(), 0)
        exchange = Exchange(tools.execution, request, runner, respond, memory_bytes)
        response: Response | None = None
        try:
            response = await exchange.run()
        finally:
            if response is None or response.meta is None:
                self._unreported_s += exchange.ran_s
        self._answered = response is not None and runner.usable
        if self._cancelled:  # perhaps while its result was stored
            self._answered = False
            response = self._with_reason(response)
        return response or await self._response_after_exit(
            request, runner, has_begun=exchange.has_begun
        )

    async def _watchers(self, request: Request, runner: RunnerHandle) -> list[asyncio.Task[None]]:
        """Watch an untrusted request's memory and threads, and any request's memory of a shared GPU."""
        if runner.pid is None:
            return []
        tools = self._tools
        if not request.trusted:
            # This watch outlasts the request: the runner may take more until it is paused.
            end = partial(self._end_excess, runner)
            watching = tools.resources.enforce(runner.pid, end)
            runner.watch(asyncio.create_task(watching, name="runner's resources"))
        zygote = tools.process.pid
        if tools.gpu_watch is None or zygote is None or not tools.process.exposes_weights:
            return []
        replica = runner.pid, zygote, self._held
        # Measured first, because a request may allocate before the watch takes its first sample.
        before = await tools.gpu_watch.before(*replica)
        watching = tools.gpu_watch.enforce(*replica, before, self.cancel)
        return [asyncio.create_task(watching, name="a GPU's memory")]

    def _end_excess(self, runner: RunnerHandle, reason: str) -> None:
        """Cancel the run on a runner that exceeded a limit, or kill the runner if it runs nothing."""
        if self._runner is runner:
            self.cancel(reason)
        else:
            # The request is over, and the next one on this runner has a watch of its own.
            runner.kill()

    def _with_limit(self, response: Response) -> Response:
        """Return the response, with the name of the limit that ended its request if one did."""
        reason = self._cancelled
        if response.status is Status.ERROR and isinstance(reason, LimitReason):
            return replace(response, limit=reason.limit)
        return response

    def _with_time(self, response: Response) -> Response:
        """Return the response, with the time of untrusted runners that ended without an answer.

        Code of an earlier request of the same key may control a runner, and may compute before it reports
        that the block begins.
        """
        if not self._unreported_s:
            return response
        ran_s = round(response.execution_s + self._unreported_s, 6)
        return replace(
            response, meta={"peak_memory": response.peak_memory, "execution_time": ran_s}
        )

    def _interrupt(self, reason: str) -> None:
        """End a block that took too long, with an error that names its line if possible."""
        if self._runner is None:
            self.cancel(reason)
        elif not self._stopped.done():
            self._stopped.set_result(reason)
            self._runner.interrupt()
            asyncio.get_running_loop().call_later(_INTERRUPT_S, self.cancel, reason)

    def _with_reason(self, response: Response | None) -> Response | None:
        """Return an interrupted block's error with the reason before it; None if it reported no error."""
        if response is None or response.status is not Status.ERROR:
            return None
        text = f"{self._cancelled}\n{response.description}"
        return replace(response, description=text)

    async def _response_after_exit(
        self, request: Request, runner: RunnerHandle, *, has_begun: bool
    ) -> Response:
        code = await runner.exit_code(EXIT_PATIENCE_S)
        if self._cancelled:
            return Response(request.id, Status.ERROR, self._cancelled)
        if self._tools.runners.unavailable or self._tools.process.ended.is_set():
            raise self._tools.runners.lost("the model process ended")
        logger.warning("request %s: its runner ended (%s)", request.id, describe_exit(code))
        if not has_begun:
            runner.kill()  # the pool may not know yet that it has ended
            raise _NotBegunError
        return Response(request.id, Status.ERROR, describe_crash(code), limit=_CRASH)
