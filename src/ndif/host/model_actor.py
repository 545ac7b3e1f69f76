"""The replica of a model on this machine, from its process to its answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ndif.config.settings import Settings
from ndif.host.device_errors import DeviceFailure
from ndif.host.evaluation import spec_of
from ndif.host.execution import Execution
from ndif.host.fork_server import ForkServers
from ndif.host.hub import Adapters
from ndif.host.model_process import ModelProcess, ModelProcessError
from ndif.host.port import FailedDeviceError, Progress, ReplicaEvictedError, Respond, ServedModel
from ndif.host.replica_runners import ReplicaRunners
from ndif.host.request_run import RequestRun, RunTools
from ndif.host.runner_pool import scope_of
from ndif.host.runner_protocol import largest_form
from ndif.host.runtimes import Runtime
from ndif.host.shared_passes import LocalSharedPasses, SharedRun
from ndif.host.shared_weights import SharedWeights
from ndif.host.snapshot import publish
from ndif.host.watchdogs import GpuWatch, ResourceWatchdog, runner_cgroups
from ndif.runtime.spec import CO_BATCHING, ModelSpec, UntrustedSettings
from ndif.runtime.weights.cache import CacheRules
from ndif.schema.deployment import Defaults, DeploymentConfig
from ndif.schema.repositories import Repositories
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.accounts import may_trust
from ndif.stores.broker import Broker
from ndif.stores.objects import ObjectStore, ObjectStoreError

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=RequestRun)

Choice = Callable[[], AbstractAsyncContextManager["Mapping[int, int] | None"]]
"""Yields the bytes of each GPU for a replica's tensors, reserved while it loads; None: as in its spec."""


@dataclass(frozen=True, slots=True)
class HostResources:
    """Objects that all replicas on one machine share."""

    weights: SharedWeights = field(default_factory=SharedWeights)
    fork_servers: ForkServers = field(default_factory=ForkServers)
    gpu_watch: GpuWatch | None = None
    """Watch over requests on GPUs that replicas share; None without such a GPU."""
    cache_rules: Callable[[], CacheRules] = CacheRules
    """Return the rules for the Hub's cache, as they are now."""
    shares_files: bool = False
    """True if another process serves the files of checkpoints to clients."""


@dataclass(frozen=True, slots=True)
class ReplicaDevices:
    """The devices that one replica is given."""

    gpu_mem_bytes_by_id: Mapping[int, int] = field(default_factory=dict)
    """Bytes that the replica may take of each GPU, contexts included; empty for no limit."""
    context_bytes: int = 0
    """Bytes of each GPU for the CUDA contexts of its processes."""
    device: str | None = None
    """Device that overrides the deployment's."""
    chosen: Choice = contextlib.nullcontext
    """Choice at the start that overrides `gpu_mem_bytes_by_id`."""
    near: Callable[[Collection[int]], Collection[int] | None] = lambda _: None
    """Return the CPUs near some GPUs, to which the replica is bound; None for all CPUs."""

    @property
    def max_memory(self) -> dict[int, int] | None:
        """Return the bytes of each GPU that are left for tensors; None where there is no GPU."""
        held, contexts = self.gpu_mem_bytes_by_id, self.context_bytes
        return {index: size - contexts for index, size in held.items()} or None


@dataclass(frozen=True, slots=True)
class ActorState:
    """The activity of a replica at one moment."""

    is_busy: bool
    runner_pid: int | None
    """Process that serves now; None while none does."""
    is_verifying: bool


class LocalModelActor:
    """One replica of one model on this machine.

    Owns the model process and the current run. Delegates each run to a `RequestRun`, and the runners to
    `ReplicaRunners`. Requests run one at a time, except trusted ones that share a forward pass.
    """

    def __init__(
        self,
        config: DeploymentConfig,
        runtime: Runtime,
        settings: Settings,
        broker: Broker,
        objects: ObjectStore,
        host: HostResources,
        devices: ReplicaDevices,
        *,
        untrusted: bool,
    ) -> None:
        """Prepare a replica; `start` loads it. `untrusted`: untrusted requests may come."""
        spec = _model_spec(config, runtime, settings, devices, untrusted=untrusted)
        process = ModelProcess(spec, runtime, host.weights, host.fork_servers, host.cache_rules)
        self.process, self.ended = process, process.ended
        self.runners = ReplicaRunners(process, settings, untrusted=untrusted)
        self.shared_passes = self._shared_passes(settings.co_batch, runtime.generation)
        self.timeout_s = config.execution_timeout_s or settings.execution_timeout_seconds
        """Seconds that a job may run."""
        self._start_timeout_s = settings.model_start_timeout_s
        self._devices = devices
        self._file_store = objects if host.shares_files else None
        """Store in which clients find the checkpoint's files; None if they are not shared."""
        limits = settings.runner_memory_bytes, settings.runner_max_threads
        self._tools = RunTools(
            process,
            self.runners,
            Execution(settings, broker, objects),
            _adapters(runtime, settings),
            ResourceWatchdog(*limits, runner_cgroups),
            host.gpu_watch,
        )
        self._run: RequestRun | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._starting: asyncio.Task[None] | None = None

    @property
    def model(self) -> ServedModel | None:
        return self.process.model

    @property
    def state(self) -> ActorState:
        """Return the activity of this moment."""
        pid = None if self._run is None else self._run.runner_pid
        return ActorState(self._run is not None, pid, self.runners.is_verifying)

    async def start(self, progress: Progress) -> None:
        """See `ModelActor.start`. Runners are ready when it returns."""
        self._starting = asyncio.create_task(self._start(progress), name="replica start")
        try:
            await self._starting
        except asyncio.CancelledError:
            if self.runners.may_fork:
                raise
            raise ModelProcessError("the replica was ended while it was loaded") from None

    async def _start(self, progress: Progress) -> None:
        async with self._devices.chosen() as memory:
            memory = self.process.spec.max_memory if memory is None else memory
            with self._device_failures_raised():
                cpus = self._devices.near(memory or ())
                await self.process.start(self._start_timeout_s, progress, memory, cpus)
        try:
            # Concurrently, so that the object store adds little to the start.
            await asyncio.gather(self.runners.start(), self._share_files())
        except BaseException:
            await self.process.stop()
            raise

    @property
    def device_failure(self) -> DeviceFailure | None:
        """See `ModelActor.device_failure`. None if the replica was evicted or ended on purpose."""
        return None if self.runners.unavailable else self.process.device_failure

    @contextlib.contextmanager
    def _device_failures_raised(self) -> Iterator[None]:
        """Re-raise an error that a GPU's failure caused as a `FailedDeviceError`."""
        try:
            yield
        except ModelProcessError as error:
            if self.runners.may_fork and (failure := self.process.device_failure) is not None:
                raise FailedDeviceError(str(error), failure) from error
            raise

    async def _share_files(self) -> None:
        """Store the files from which clients build the model; only log a failure: the replica can serve."""
        model = self.process.model
        if self._file_store is None or model is None:
            return
        folder = model.folder
        try:
            key = await publish(Path(folder), self.process.spec.revision, self._file_store)
        except (ObjectStoreError, OSError) as error:
            logger.warning("the files of %s cannot be shared with clients: %s", folder, error)
        except Exception:
            logger.exception("the files of %s cannot be shared with clients", folder)
        else:
            self.process.model = replace(model, files=key)

    async def to_cache(self) -> None:
        with contextlib.suppress(ModelProcessError):  # `ended` says so
            self.runners.evict("the replica was taken off its device")
            await self.process.end_runners()
            await self._idle.wait()
            await self.runners.clear()
            if self.process.exposes_weights:
                await self.process.cache(self._start_timeout_s)

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        # Otherwise the weights have not moved, and the given GPUs are only declared, not present.
        if self.process.exposes_weights:
            if not gpu_mem_bytes_by_id and self.process.spec.max_memory is not None:
                raise ModelProcessError("a model that was loaded for GPUs cannot come to the CPU")
            self._devices = replace(self._devices, gpu_mem_bytes_by_id=gpu_mem_bytes_by_id)
            memory = self._devices.max_memory
            with self._device_failures_raised():
                cpus = self._devices.near(gpu_mem_bytes_by_id)
                await self.process.uncache(memory, cpus, self._start_timeout_s)
        await self.runners.start()

    async def stop(self) -> None:
        self.runners.evict("the replica was ended")
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self.process.stop()
        await self.runners.close()

    async def run(self, request: Request, respond: Respond) -> Response:
        with self._busy(RequestRun) as run:
            return await run.run(request, respond)

    def _shared_passes(self, most: int, generation: str) -> LocalSharedPasses | None:
        if most == 1 or generation not in CO_BATCHING:
            return None
        return LocalSharedPasses(most, lambda: self._busy(SharedRun))

    def cancel(self, reason: str) -> None:
        if self._run is not None:
            self._run.cancel(reason)

    @contextlib.contextmanager
    def _busy(self, kind: type[R]) -> Iterator[R]:
        """Mark the replica busy with a new run, or raise a `ReplicaEvictedError` if none may run here."""
        if self.runners.unavailable:
            raise ReplicaEvictedError(self.runners.unavailable)
        self._idle.clear()
        held = self._devices.gpu_mem_bytes_by_id
        run = kind(self._tools, held, self.timeout_s)
        self._run = run
        try:
            yield run
        finally:
            run.close()
            self._run = None
            self._idle.set()


def _model_spec(
    config: DeploymentConfig,
    runtime: Runtime,
    settings: Settings,
    devices: ReplicaDevices,
    *,
    untrusted: bool,
) -> ModelSpec:
    return spec_of(
        config,
        runtime.generation,
        dtype=Defaults.of(settings).dtype_of(config),
        device=devices.device or config.device,
        attn_implementation=config.attn_implementation,
        threads=config.threads,
        untrusted=_untrusted_settings(settings) if untrusted else None,
        pickled=bool(settings.allow_pickled_weights),
        max_memory=devices.max_memory,
    )


def _adapters(runtime: Runtime, settings: Settings) -> Adapters:
    return Adapters(
        runtime,
        settings.adapters,
        settings.max_adapter_bytes,
        settings.adapter_cache_bytes,
        Repositories.of(settings),
    )


def _untrusted_settings(settings: Settings) -> UntrustedSettings:
    return UntrustedSettings(
        sandbox=settings.sandbox,
        protector=settings.protector == "on",
        whitelist=str(settings.whitelist.absolute()) if settings.whitelist else None,
        memory_bytes=settings.runner_memory_bytes,
        result_bytes=largest_form(settings.max_result_bytes),
        max_threads=settings.runner_max_threads,
        adapters=str(settings.adapters),
        scope=scope_of(settings),
        every_request=settings.sandbox != "off" and not may_trust(settings),
    )
