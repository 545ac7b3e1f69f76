"""A simulated replica, which takes the time of a real replica without its work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ndif.config.units import format_duration
from ndif.host.device_errors import DeviceFailure
from ndif.host.execution import announce
from ndif.host.port import Progress, ReplicaEvictedError, Respond, ServedModel
from ndif.placement.replica import PlacedReplica
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import Variant
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.simulation.journal import Journal
from ndif.simulation.world import World


class SimulatedActor:
    """A simulated `ModelActor` whose steps take the world's durations and are recorded in the journal."""

    def __init__(
        self, config: DeploymentConfig, deployment: PlacedReplica, world: World, journal: Journal
    ) -> None:
        self.ended = asyncio.Event()
        self.shared_passes = None
        self.device_failure: DeviceFailure | None = None
        self.model: ServedModel | None = None
        self._config = config
        self._bytes = deployment.size_bytes
        self._on_cpu = deployment.on_cpu
        self._assigned = deployment.gpu_mem_bytes_by_id
        self._gpu_bytes = next(
            node.resources.gpu_bytes for node in world.nodes if node.id == deployment.node_id
        )
        self._world = world
        self._journal = journal
        variant = Variant.parse(deployment.model_key)
        self._usages = (journal.by_model[variant], journal.by_node[deployment.node_id])
        self._gpus = 0.0
        self._cpu_bytes = 0
        self._is_hot = self._is_warm = False
        self._run: asyncio.Future[str | None] | None = None

    async def start(self, progress: Progress) -> None:
        """Simulate loading from disk; see `ModelActor.start`."""
        self._hold(self._assigned)
        progress(0, self._bytes)
        await self._load(self._world.speeds.loading_s(self._bytes))
        progress(self._bytes, self._bytes)
        self._is_hot = True
        for usage in self._usages:
            usage.cold_loads += 1

    async def to_cache(self) -> None:
        """Simulate leaving the device; see `ModelActor.to_cache`."""
        self._interrupt()
        if not self._on_cpu:
            await asyncio.sleep(self._world.speeds.caching_s(self._bytes))
        self._hold(None, warm=True)
        self._is_hot, self._is_warm = False, True
        for usage in self._usages:
            usage.evicted_warm += 1

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        """Simulate returning to the device; see `ModelActor.from_cache`."""
        self._hold(gpu_mem_bytes_by_id)
        self._is_warm = False
        if not self._on_cpu:
            await self._load(self._world.speeds.returning_s(self._bytes))
        self._is_hot = True
        for usage in self._usages:
            usage.warm_returns += 1

    async def stop(self) -> None:
        """Free the memory; see `ModelActor.stop`."""
        if self.ended.is_set():
            return
        self._interrupt()
        self._hold(None)
        for usage in self._usages:
            usage.evicted_cold += self._is_hot
            usage.dropped += self._is_warm
        self._is_hot = self._is_warm = False
        self.ended.set()

    async def run(self, request: Request, respond: Respond) -> Response:
        await announce(request, respond)
        await respond(Response(request.id, Status.RUNNING, "Your job has begun."))
        outcome = self._journal.of(request)
        outcome.on_cpu, run_s = self._on_cpu, outcome.asked.run_s
        if self._on_cpu:
            run_s *= self._world.speeds.cpu_slowdown
        limit_s = self._config.execution_timeout_s or self._world.execution_timeout_s
        try:
            reason = await self._run_for(min(run_s, limit_s))
        except ReplicaEvictedError:
            # The request waits again, and may now be refused.
            outcome.dispatched, outcome.on_cpu = None, False
            raise
        if reason is None and run_s > limit_s:
            reason = f"The job ran longer than its limit of {format_duration(limit_s)}."
        if reason is not None:
            return Response(request.id, Status.ERROR, reason)
        return Response(request.id, Status.COMPLETED, "Your job has been completed.")

    def cancel(self, reason: str) -> None:
        """Cancel the running request; see `ModelActor.cancel`."""
        if self._run is not None and not self._run.done():
            self._run.set_result(reason)

    async def _run_for(self, seconds: float) -> str | None:
        """Mark the GPUs busy for `seconds`; return the reason of a cancellation, else None."""
        run = self._run = asyncio.get_running_loop().create_future()
        gpus = self._gpus
        self._busy(gpus)
        try:
            await asyncio.wait({run}, timeout=seconds)
            return run.result() if run.done() else None
        finally:
            self._busy(-gpus)
            self._run = None

    def _interrupt(self) -> None:
        if self._run is not None and not self._run.done():
            for usage in self._usages:
                usage.interrupted += 1
            self._run.set_exception(ReplicaEvictedError("its replica was evicted"))

    def _busy(self, gpus: float) -> None:
        now = asyncio.get_running_loop().time()
        for usage in self._usages:
            usage.gpus_busy.change(now, gpus)

    def _hold(self, gpus: Mapping[int, int] | None, *, warm: bool = False) -> None:
        """Record that the replica holds exactly these GPUs, or CPU memory."""
        now = asyncio.get_running_loop().time()
        share = sum(held / self._gpu_bytes[index] for index, held in (gpus or {}).items())
        has_memory = warm or (self._on_cpu and gpus is not None)
        cpu_bytes = self._bytes if has_memory else 0
        for usage in self._usages:
            usage.gpus_held.change(now, share - self._gpus)
            usage.cpu_bytes.change(now, cpu_bytes - self._cpu_bytes)
        self._gpus, self._cpu_bytes = share, cpu_bytes

    async def _load(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        try:
            await asyncio.sleep(seconds)
        finally:
            for usage in self._usages:
                usage.loading_s += now() - began
