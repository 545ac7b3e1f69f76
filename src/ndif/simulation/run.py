"""Replay of a trace by the server's own queue, controller and reconciler, with simulated replicas."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from packaging.version import Version

from ndif.cluster.controller import Controller
from ndif.cluster.models import Models
from ndif.control.reconciler import Reconciler
from ndif.host.evaluation import Measured
from ndif.host.port import ActorError
from ndif.placement.node import Node
from ndif.queue.autoscaler import Scaling
from ndif.queue.dispatcher import Dispatcher
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request, Wire
from ndif.simulation import virtual_time
from ndif.simulation.actor import SimulatedActor
from ndif.simulation.journal import Journal, JournalBroker
from ndif.simulation.trace import TraceError, TraceRequest
from ndif.simulation.world import World
from ndif.stores.objects import FileStore
from ndif.stores.responder import Responder
from ndif.tasks import within

_SYNC_S = 30.0
_PATIENCE_S = 86400.0
"""Seconds after the last request after which the simulation ends with unfinished requests."""
_NEVER_S = 1e9
"""Seconds between position updates: simulated clients read none."""
_SUBSCRIPTION = "simulation"
_EVERY = 1000
_MOST_NAMED = 5

Progress = Callable[[int], None]
"""Called regularly with the number of sent requests."""


def run(
    world: World,
    trace: Sequence[TraceRequest],
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Journal:
    """Replay a trace that is ordered by time; equal arguments give equal journals.

    Raises:
        TraceError: If the size of a model is unknown.
    """
    names = {request.model.repo_id for request in trace}
    unknown = sorted(name for name in names if world.weights(name) is None)
    if unknown:
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        raise TraceError(
            f"The sizes of these models of the trace are unknown: "
            f"{', '.join(unknown[:_MOST_NAMED])}{more}. Add them to models in the cluster file, or "
            "add default_size."
        )
    # Otherwise the garbage collector would traverse the whole trace repeatedly without freeing memory.
    gc.collect()
    gc.freeze()
    try:
        return virtual_time.run(_Simulation(world, trace, seed, progress).run())
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class _Simulation:
    """A server without a gateway, and its clients."""

    world: World
    trace: Sequence[TraceRequest]
    seed: int
    progress: Progress

    async def run(self) -> Journal:
        journal = Journal(self.trace)
        with tempfile.TemporaryDirectory(prefix="ndif-simulation-") as unused:
            await self._serve(journal, FileStore(Path(unused), _NEVER_S))
        journal.close(asyncio.get_running_loop().time())
        return journal

    def _now(self) -> float:
        return self.trace[0].at + asyncio.get_running_loop().time()

    async def _serve(self, journal: Journal, objects: FileStore) -> None:
        world = self.world
        broker = JournalBroker(journal)
        controller = Controller(
            Models(world.models),
            lambda config, _, place: SimulatedActor(config, place, world, journal),
            self._evaluate,
            self._discover,
            rules=world.rules,
            now=self._now,
            rng=random.Random(self.seed),  # noqa: S311 - ties, not secrets
        )
        queue_policy = replace(world.queue_policy, update_interval_s=_NEVER_S)
        dispatcher = Dispatcher(controller, broker, Responder(broker, objects), queue_policy)
        generations = sorted({r.generation for r in self.trace}, key=Version, reverse=True)
        reconciler = Reconciler(
            controller,
            dispatcher,
            Scaling(dispatcher, world.autoscale, self._now),
            None,
            lambda: generations,
            _SYNC_S,
            lambda: datetime.fromtimestamp(self._now(), timezone.utc),
        )
        await reconciler.sync()  # dedicated models load before the first request
        dispatcher.start()
        keeping = asyncio.create_task(reconciler.run(), name="reconciler")
        try:
            await self._send(broker, journal)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(journal.all_ended.wait(), _PATIENCE_S)
        finally:
            keeping.cancel()

    async def _send(self, broker: JournalBroker, journal: Journal) -> None:
        loop = asyncio.get_running_loop()
        for number, request in enumerate(self.trace):
            if (left_s := request.at - self._now()) > 0:
                await asyncio.sleep(left_s)
            journal.outcomes[number].received = loop.time()
            if number % _EVERY == 0:
                self.progress(number)
            await broker.submit(
                Request(
                    model=request.model,
                    generation=request.generation,
                    wire=Wire.ENVELOPE,
                    payload=b"",
                    compress=False,
                    base_url="",
                    subscription_id=_SUBSCRIPTION,
                    user=request.user,
                    weight=request.weight,
                    priority=request.priority,
                    hotswapping=True,
                    id=str(number),
                    received=request.at,
                )
            )
        self.progress(len(self.trace))

    async def _evaluate(self, config: DeploymentConfig, generation: str) -> Measured:
        size_bytes = self.world.replica_bytes(config)
        if size_bytes is None:
            raise ActorError("its size is unknown")
        return Measured(size_bytes)

    async def _discover(self) -> tuple[Node, ...]:
        return self.world.nodes
