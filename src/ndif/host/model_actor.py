"""The replica of a model on this machine, from its process to its answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.host.channel import ProtocolError
from ndif.host.device_errors import DeviceFailure
from ndif.host.evaluation import spec_of
from ndif.host.execution import EXIT_PATIENCE_S, SLACK, Execution, announce
from ndif.host.fork_server import ForkServers
from ndif.host.hub import AdapterError, Adapters
from ndif.host.model_process import GONE_S, ModelProcess, ModelProcessError
from ndif.host.port import (
    DeviceError,
    Progress,
    ReplicaEvictedError,
    ReplicaLostError,
    Respond,
    ServedModel,
)
from ndif.host.runner_handle import (
    RunnerEndedError,
    RunnerError,
    RunnerHandle,
    describe_crash,
    describe_exit,
)
from ndif.host.runner_pool import (
    FreshRunners,
    PersistentRunner,
    PerUserRunners,
    RunnerPool,
    scope_of,
)
from ndif.host.runner_protocol import LimitError, LimitReason, NoLiveClientError
from ndif.host.runtimes import Runtime
from ndif.host.shared_weights import SharedWeights
from ndif.host.snapshot import publish
from ndif.host.watchdogs import GpuWatch, ResourceWatchdog, runner_cgroups
from ndif.runtime.spec import CO_BATCHING, UntrustedSettings
from ndif.runtime.weights.cache import CacheRules
from ndif.schema.deployment import Defaults, DeploymentConfig
from ndif.schema.repositories import Repositories
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.accounts import may_trust
from ndif.stores.broker import Broker, BrokerError
from ndif.stores.objects import DiskError, MemoryFullError, ObjectStore, ObjectStoreError
from ndif.tasks import end
from ndif.telemetry.steps import step

logger = logging.getLogger(__name__)

_NOT_STORED = "The job ran, and its result could not be stored: {}. Send it again in a moment."
_AWAY = "this server cannot reach its object store"

_RUNNERS = 5
"""Runners that a request is given whose processes end before its block begins."""
_CRASH = "crash"
"""Name for metrics of a run whose process ended by itself, as if it had exceeded a limit."""
_NOT_BEGUN = (
    f"{_RUNNERS} processes in a row ended before your block could begin in them: something on this server "
    "ends them. Send the job again, and tell its operator if that does not help."
)

_PASS_S = 60.0
"""Seconds after which a forward pass of several requests is given up, and each of them runs alone."""
_INTERRUPT_S = 3.0
"""Seconds that a block has to end once it was interrupted."""

Choice = Callable[[], AbstractAsyncContextManager["Mapping[int, int] | None"]]
"""Chooses what the tensors of a replica may take of which GPUs while it loads; None: as it was given."""


class _NotBegunError(Exception):
    """The runner ended before the block began, so that the request may run on the next one."""


class LocalModelActor:
    """Runs requests: trusted ones on a *kept* runner, others each on a *fresh* one.

    They run one at a time, but for trusted ones that share a forward pass.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        runtime: Runtime,
        settings: Settings,
        broker: Broker,
        objects: ObjectStore,
        weights: SharedWeights,
        fork_servers: ForkServers | None = None,
        *,
        untrusted: bool,
        gpu_mem_bytes_by_id: Mapping[int, int] | None = None,
        device: str | None = None,
        shares: bool = False,
        context_bytes: int = 0,
        chosen: Choice = contextlib.nullcontext,
        gpu_watch: GpuWatch | None = None,
        near: Callable[[Collection[int]], Collection[int] | None] = lambda _: None,
        cache_rules: Callable[[], CacheRules] = CacheRules,
    ) -> None:
        """Prepare a replica; `start` loads it. Replicas share `weights` and `fork_servers`.

        `untrusted`: requests may come that are not trusted. `gpu_mem_bytes_by_id`: bytes that it may take
        of which GPUs, `context_bytes` of each for the CUDA contexts of its processes; None for what it
        likes. `device` goes before the one in `config`. `shares`: another process answers clients who ask
        for the checkpoint's files. `chosen` says at the start, in the place of these, what its tensors
        may take of which GPUs, and `near` on which CPUs it runs, beside the GPUs that it is given.
        `cache_rules` returns the rules for the Hub's cache.
        """
        spec = spec_of(
            config,
            runtime.generation,
            dtype=Defaults.of(settings).dtype_of(config),
            device=device or config.device,
            attn_implementation=config.attn_implementation,
            threads=config.threads,
            untrusted=_untrusted(settings) if untrusted else None,
            pickled=bool(settings.allow_pickled_weights),
            max_memory=_for_tensors(gpu_mem_bytes_by_id or {}, context_bytes),
        )
        self.most_together = settings.co_batch if runtime.generation in CO_BATCHING else 1
        self._context_bytes = context_bytes
        self._held = gpu_mem_bytes_by_id or {}
        """Bytes that it has of each GPU, contexts among them."""
        self._gpu_watch = gpu_watch
        self._near = near
        self._chosen = chosen
        servers = fork_servers or ForkServers()
        self.process = ModelProcess(spec, runtime, weights, servers, cache_rules)
        self._objects = objects if shares else None
        self._settings = settings
        self._timeout_s = config.execution_timeout_s or settings.execution_timeout_seconds
        self._kept = PersistentRunner(lambda: self._fork(fresh=False))
        self._fresh = PerUserRunners(
            FreshRunners(lambda: self._fork(fresh=True), settings.runner_pool),
            settings.runner_idle_s,
            settings.runner_max_requests,
        )
        self._first: RunnerPool = self._fresh if untrusted else self._kept
        self._execution = Execution(settings, broker, objects)
        self._adapters = Adapters(
            runtime,
            settings.adapters,
            settings.max_adapter_bytes,
            settings.adapter_cache_bytes,
            Repositories.of(settings),
        )
        self._watch = ResourceWatchdog(
            settings.runner_memory_bytes, settings.runner_max_threads, runner_cgroups
        )
        self._runner: RunnerHandle | None = None
        self._verifying: asyncio.Task[None] | None = None
        self._waited: RunnerHandle | None = None
        """The untrusted runner that served last and may have written to the weights since."""
        self._stopped: asyncio.Future[str] | None = None
        """The reason why the last request ends early; not done while it does not."""
        self._acquiring = asyncio.Lock()
        """Held while a runner is sought, which may go on for a request that has ended."""
        self._away = "the replica has not been started"
        """Why no request may run here; nothing if one may."""
        self._forks = True
        self._idle = asyncio.Event()
        self._idle.set()
        self._starting: asyncio.Task[None] | None = None
        self.ended = self.process.ended

    @property
    def model(self) -> ServedModel | None:
        """See `ModelActor.model`."""
        return self.process.model

    async def start(self, progress: Progress) -> None:
        """See `ModelActor.start`. Runners are ready when it returns."""
        self._starting = asyncio.create_task(self._start(progress), name="replica start")
        try:
            await self._starting
        except asyncio.CancelledError:
            if self._forks:
                raise
            raise ModelProcessError("the replica was ended while it was loaded") from None

    async def _start(self, progress: Progress) -> None:
        async with self._chosen() as memory:
            memory = self.process.spec.max_memory if memory is None else memory
            with self._blames_device():
                await self.process.start(
                    self._settings.model_start_timeout_s, progress, memory, self._near(memory or ())
                )
        try:
            # Nobody who waits for it waits for an object store as well.
            await asyncio.gather(self._have_runners(), self._share())
        except BaseException:
            await self.process.stop()
            raise

    @property
    def device_failure(self) -> DeviceFailure | None:
        """See `ModelActor.device_failure`. One that was ended has not failed."""
        return None if self._away else self.process.device_failure

    @contextlib.contextmanager
    def _blames_device(self) -> Iterator[None]:
        """Say of what fails here that a GPU is to blame, where one is."""
        try:
            yield
        except ModelProcessError as error:
            if self._forks and (failure := self.process.device_failure) is not None:
                raise DeviceError(str(error), failure) from error
            raise

    async def _share(self) -> None:
        """Share the files from which clients build the model; the replica serves without that, too."""
        model = self.process.model
        if self._objects is None or model is None:
            return
        folder = model.folder
        try:
            key = await publish(Path(folder), self.process.spec.revision, self._objects)
        except (ObjectStoreError, OSError) as error:
            logger.warning("clients cannot have the files of %s from here: %s", folder, error)
        except Exception:
            logger.exception("clients cannot have the files of %s from here", folder)
        else:
            self.process.model = replace(model, files=key)

    async def _have_runners(self) -> None:
        self._forks = True
        # Whoever shares weights on GPUs could write to them.
        self._fresh.most = 1 if self.process.exposes_weights else self._settings.runner_users
        before = self.process.lines
        try:
            await self._first.start()
        except RunnerEndedError as error:
            said = await self.process.last_words(before)
            raise ModelProcessError(f"{error}; its last words: {said}") from error
        except RunnerError as error:
            raise ModelProcessError(str(error)) from error
        self._away = ""

    async def to_cache(self) -> None:
        """See `ModelActor.to_cache`."""
        with contextlib.suppress(ModelProcessError):  # `ended` says so
            self._evict("the replica was taken off its device")
            await self.process.end_runners()
            await self._idle.wait()
            async with self._acquiring:
                await asyncio.gather(self._kept.clear(), self._fresh.clear())
            await self._pristine()
            await self._verify_after(None)
            if self.process.exposes_weights:
                await self.process.cache(self._settings.model_start_timeout_s)

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        """See `ModelActor.from_cache`."""
        # Elsewhere its weights are where it runs; GPUs that it is given are only declared to be there.
        if self.process.exposes_weights:
            if not gpu_mem_bytes_by_id and self.process.spec.max_memory is not None:
                raise ModelProcessError("a model that was loaded for GPUs cannot come to the CPU")
            self._held = gpu_mem_bytes_by_id
            memory = _for_tensors(gpu_mem_bytes_by_id, self._context_bytes)
            timeout_s = self._settings.model_start_timeout_s
            with self._blames_device():
                await self.process.uncache(memory, self._near(self._held), timeout_s)
        await self._have_runners()

    async def stop(self) -> None:
        """See `ModelActor.stop`."""
        self._evict("the replica was ended")
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self.process.stop()
        await asyncio.gather(self._kept.wait_until_reset(), self._fresh.wait_until_reset())
        if self._verifying is not None:
            await end([self._verifying])

    def _evict(self, why: str) -> None:
        """Start no process for a request any more."""
        self._forks = False
        # A request that took the process down with it was not evicted, whoever cleans up afterwards.
        if not self.process.ended.is_set():
            self._away = why

    async def _fork(self, *, fresh: bool) -> RunnerHandle:
        if not self._forks:
            raise ModelProcessError(self._away)
        if not fresh and self.process.is_confined:
            # A user is trusted who was not when it was loaded: the next process is not confined.
            self.process.kill()
            raise ModelProcessError("the model is loaded again for users who are trusted")
        return await self.process.fork(fresh=fresh, reused=fresh and self._per_user)

    @property
    def _per_user(self) -> bool:
        """Return True if a confined runner serves one key's requests in a row."""
        return scope_of(self._settings) == "user"

    async def run(self, request: Request, respond: Respond) -> Response:
        """See `ModelActor.run`."""
        if self._away:
            raise ReplicaEvictedError(self._away)
        with self._busy() as stopped:
            await announce(request, respond)
            late = (
                f"The job ran longer than {format_duration(self._timeout_s)}, the most that this "
                "server allows (NDIF_EXECUTION_TIMEOUT_SECONDS), and was ended."
            )
            with self._limited(self._timeout_s, lambda: self._interrupt(LimitReason(late, "time"))):
                for _ in range(_RUNNERS):
                    with contextlib.suppress(_NotBegunError):
                        response = await self._serve(request, respond, stopped)
                        return self._with_limit(response)
            return Response(request.id, Status.ERROR, _NOT_BEGUN)

    async def run_together(self, requests: Sequence[Request]) -> list[Response | None]:
        """See `ModelActor.run_together`."""
        if self._away:
            raise ReplicaEvictedError(self._away)
        # A block of them that does not end is ended where it runs alone.
        limit_s = min(_PASS_S, self._timeout_s)
        with self._busy() as stopped, self._limited(limit_s, lambda: self.cancel("it takes long")):
            try:
                runner = await self._acquired(requests[0], stopped)
                if runner is None:
                    return [None] * len(requests)
                return await self._serve_together(runner, requests)
            except (ModelProcessError, RunnerError) as error:
                raise self._lost(str(error)) from error

    @contextlib.contextmanager
    def _busy(self) -> Iterator[asyncio.Future[str]]:
        """Be busy; give the future whose result is the reason why the run ends early."""
        self._idle.clear()
        stopped = self._stopped = asyncio.get_running_loop().create_future()
        try:
            yield stopped
        finally:
            if not stopped.done():
                stopped.set_result("")  # a runner that is still sought is for nobody
            self._idle.set()

    @contextlib.contextmanager
    def _limited(self, seconds: float, late: Callable[[], None]) -> Iterator[None]:
        """Call `late` if the context lasts longer."""
        timer = asyncio.get_running_loop().call_later(seconds, late)
        try:
            yield
        finally:
            timer.cancel()

    async def _serve(
        self, request: Request, respond: Respond, stopped: asyncio.Future[str]
    ) -> Response:
        """Run a request on a runner, or end it as soon as it is `stopped`."""
        try:
            runner = await self._acquired(request, stopped)
            if runner is None:
                return Response(request.id, Status.ERROR, stopped.result())
            return await self._serve_on(runner, request, respond)
        except (ModelProcessError, RunnerError) as error:
            raise self._lost(str(error)) from error

    async def _acquired(
        self, request: Request, stopped: asyncio.Future[str]
    ) -> RunnerHandle | None:
        """Return a runner; None as soon as the request is `stopped`. A search that is cancelled goes on."""
        acquiring = asyncio.create_task(self._acquire(request, stopped), name="acquire a runner")
        acquiring.add_done_callback(lambda task: task.cancelled() or task.exception())
        either: set[asyncio.Future[Any]] = {acquiring, stopped}
        with step("acquire"):
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return acquiring.result() if acquiring.done() else None

    async def _acquire(self, request: Request, stopped: asyncio.Future[str]) -> RunnerHandle | None:
        """Return a runner on which the request finds nothing of others; None once it is `stopped`."""
        runners = self._pool(request)
        async with self._acquiring:
            if stopped.done():
                return None
            await self._pristine()
            if request.trusted:
                # No untrusted process is left beside it.
                await self._fresh.end_all()
            runner = await runners.acquire(request.key if self._per_user else "")
            await self._verify_after(None if request.trusted else runner)
            if not stopped.done():
                return runner
            runners.release(runner, answered=False)
            return None

    def _pool(self, request: Request) -> RunnerPool:
        return self._kept if request.trusted else self._fresh

    async def _serve_on(self, runner: RunnerHandle, request: Request, respond: Respond) -> Response:
        """Run one request on a runner, and return the runner to its pool."""
        begun = False

        async def respond_once_begun(response: Response) -> bool:
            nonlocal begun
            begun = True
            # A client that does not read has its job wait, but not the end of a job that is cancelled.
            return await runner.unless_cut(respond(response)) is not False

        self._runner = runner
        watching: list[asyncio.Task[None]] = []
        answered = False
        try:
            watching += await self._watchers(request, runner)
            # Where no untrusted request may come, the runner itself reaches the hub.
            if self.process.spec.untrusted is not None and not self._cancelled:
                fetching = self._adapters.fetch(request.env, trusted=request.trusted)
                await runner.unless_ended(fetching)
            if self._cancelled:  # while there was nothing to end
                return Response(request.id, Status.ERROR, self._cancelled)
            response = await self._execution.run(request, runner, respond_once_begun)
            answered = response is not None and runner.usable
            if self._cancelled:  # while its result was stored, it may be
                answered = False
                response = self._interrupted(response)
            return response or await self._ended(request, runner, begun=begun)
        except ProtocolError as error:
            runner.kill()
            # A block that was interrupted may have left half a frame.
            reason = self._cancelled or f"The runner broke its protocol and was ended: {error}."
            return Response(request.id, Status.ERROR, reason)
        except ObjectStoreError as error:
            logger.warning("request %s: its result is lost: %s", request.id, error)
            # Of a store elsewhere the message names the address, which is for the log alone.
            is_said = isinstance(error, DiskError | MemoryFullError)
            why = str(error) if is_said else _AWAY
            return Response(request.id, Status.ERROR, _NOT_STORED.format(why))
        except LimitError as error:
            runner.kill()
            return Response(request.id, Status.ERROR, str(error), limit=error.limit)
        except (AdapterError, NoLiveClientError) as error:
            runner.kill()
            return Response(request.id, Status.ERROR, str(error))
        finally:
            self._release(runner, watching, request, answered=answered)

    async def _serve_together(
        self, runner: RunnerHandle, requests: Sequence[Request]
    ) -> list[Response | None]:
        """Run requests on a runner, and return the runner to its pool."""
        self._runner = runner
        watching: list[asyncio.Task[None]] = []
        answered = False
        try:
            watching += await self._watchers(requests[0], runner)
            found = await self._execution.run_together(requests, runner)
            answered = runner.usable
        except (ProtocolError, ObjectStoreError, BrokerError) as error:
            logger.warning("%d requests run alone: %s", len(requests), error)
            return [None] * len(requests)
        else:
            return found
        finally:
            self._release(runner, watching, requests[0], answered=answered)

    def _release(
        self,
        runner: RunnerHandle,
        watching: Sequence[asyncio.Task[None]],
        request: Request,
        *,
        answered: bool,
    ) -> None:
        """Return a runner to its pool after a request."""
        for task in watching:
            task.cancel()
        self._runner = None
        self._pool(request).release(runner, answered=answered)
        if self.process.exposes_weights:
            verifying = self._verify(runner, trusted=request.trusted)
            self._verifying = asyncio.create_task(verifying, name="weights")

    async def _watchers(self, request: Request, runner: RunnerHandle) -> list[asyncio.Task[None]]:
        """Watch what a request takes: of the CPU an untrusted one, of a GPU that others share any."""
        if runner.pid is None:
            return []
        if not request.trusted:
            # Until it is stopped it may take more.
            end = partial(self._exceeded, runner)
            watching = self._watch.enforce(runner.pid, end)
            runner.watch(asyncio.create_task(watching, name="runner's resources"))
        zygote = self.process.pid
        if self._gpu_watch is None or zygote is None or not self.process.exposes_weights:
            return []
        replica = runner.pid, zygote, self._held
        # A request may take what it takes sooner than the watch first looks.
        before = await self._gpu_watch.before(*replica)
        watching = self._gpu_watch.enforce(*replica, before, self.cancel)
        return [asyncio.create_task(watching, name="a GPU's memory")]

    def _exceeded(self, runner: RunnerHandle, reason: str) -> None:
        """End what runs on a runner that took too much, or the runner where nothing runs."""
        if self._runner is runner:
            self.cancel(reason)
        else:
            runner.kill()

    async def _verify(self, runner: RunnerHandle, *, trusted: bool) -> None:
        """See that a runner left the weights that it shared as they were, or else end the replica."""
        # Until it is gone or stopped, it may still write; a trusted one has no reason to.
        if await (self._kept if trusted else self._fresh).wait_until_reset():
            self._waited = None if trusted else runner
            if not trusted:
                runner.pause()
        else:
            self._waited = None
            await runner.exit_code(GONE_S)
            if runner.alive:
                self.process.kill()
                raise ModelProcessError(
                    f"a runner could not be ended within {format_duration(GONE_S)}"
                )
        await self._restore()

    async def _verify_after(self, runner: RunnerHandle | None) -> None:
        """Verify the weights again, unless the `runner` after which they were verified serves next."""
        last = self._waited
        if last is not None and last is not runner:
            self._waited = None
            await self._restore()

    async def _restore(self) -> None:
        if restored := await self.process.verify():
            logger.warning("a request had changed %d of the weights; they are restored", restored)

    async def _pristine(self) -> None:
        """Return once a request cannot find what another did to the weights."""
        verifying, self._verifying = self._verifying, None
        if verifying is not None:
            await verifying

    def cancel(self, reason: str) -> None:
        """End what is running now; its request becomes an ERROR with `reason`."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(reason)
        if self._runner is not None:
            self._runner.kill()

    @property
    def _cancelled(self) -> str:
        """Return the reason why the request that runs now ends early; nothing if it does not."""
        stopped = self._stopped
        return stopped.result() if stopped is not None and stopped.done() else ""

    def _with_limit(self, response: Response) -> Response:
        """Return a response that names the limit for which its request was ended, if it was."""
        reason = self._cancelled
        if response.status is Status.ERROR and isinstance(reason, LimitReason):
            return replace(response, limit=reason.limit)
        return response

    def _interrupt(self, reason: str) -> None:
        """End a block that took too long, with an error that names its line if possible."""
        if self._runner is None:
            self.cancel(reason)
        elif self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(reason)
            self._runner.interrupt()
            asyncio.get_running_loop().call_later(_INTERRUPT_S, self._kill_running, self._runner)

    def _kill_running(self, runner: RunnerHandle) -> None:
        if runner is self._runner:
            runner.kill()

    def _interrupted(self, response: Response | None) -> Response | None:
        """Return the error of a block that was interrupted, with the reason; None if it has no error."""
        if response is None or response.status is not Status.ERROR:
            return None
        text = f"{self._cancelled}\n{response.description}"
        return replace(response, description=text)

    async def _ended(self, request: Request, runner: RunnerHandle, *, begun: bool) -> Response:
        code = await runner.exit_code(EXIT_PATIENCE_S)
        if self._cancelled:
            return Response(request.id, Status.ERROR, self._cancelled)
        if self._away or self.process.ended.is_set():
            raise self._lost("the model process ended")
        logger.warning("request %s: its runner ended (%s)", request.id, describe_exit(code))
        if not begun:
            runner.kill()  # the pool need not have heard of its end
            raise _NotBegunError
        return Response(request.id, Status.ERROR, describe_crash(code), limit=_CRASH)

    def _lost(self, why: str) -> ReplicaLostError:
        return ReplicaEvictedError(self._away) if self._away else ReplicaLostError(why)


def _for_tensors(held: Mapping[int, int], context_bytes: int) -> dict[int, int] | None:
    """Return the bytes of each GPU that are left for tensors; None where there is no GPU."""
    return {index: size - context_bytes for index, size in held.items()} or None


def _untrusted(settings: Settings) -> UntrustedSettings:
    # zstd of what it cannot squeeze is a little larger than that.
    largest = settings.max_result_bytes + settings.max_result_bytes // 1000 + SLACK
    return UntrustedSettings(
        sandbox=settings.sandbox,
        protector=settings.protector == "on",
        whitelist=str(settings.whitelist.absolute()) if settings.whitelist else None,
        memory_bytes=settings.runner_memory_bytes,
        result_bytes=largest,
        max_threads=settings.runner_max_threads,
        adapters=str(settings.adapters),
        scope=scope_of(settings),
        alone=settings.sandbox != "off" and not may_trust(settings),
    )
