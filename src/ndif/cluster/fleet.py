"""The fleet: where replicas can be, and what makes one there: this machine, or a Ray cluster's nodes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ndif.cluster.asking import Living
from ndif.cluster.deployment import Deployment
from ndif.cluster.local_cards import LocalCards
from ndif.cluster.node import Node
from ndif.cluster.resources import Resources, parse_gpus
from ndif.config import Settings
from ndif.host import gpus, machine, numa
from ndif.host.actor import ModelActor
from ndif.host.blanks import Blanks
from ndif.host.contexts import context_bytes
from ndif.host.gpu_watch import GpuWatch
from ndif.host.gpus import Driver, Visible, without_memory
from ndif.host.port import Actor
from ndif.host.runtimes import Runtime, Runtimes
from ndif.host.weights import Weights
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.quantities import size
from ndif.stores.broker import Broker
from ndif.stores.objects import ObjectStore

logger = logging.getLogger(__name__)


class Fleet(Protocol):
    """Machines, and the making of replicas on them."""

    outlives: bool
    """Whether its replicas go on when whoever leads does not."""
    lost: asyncio.Event
    """Set once the machines are out of reach for good."""

    async def connect(self, waiting: Callable[[], None]) -> None:
        """Return once the machines can be reached; `waiting` is called each time that they cannot."""
        ...

    async def close(self) -> None:
        """Reach them no more."""
        ...

    async def living(self) -> Sequence[Living]:
        """The replicas that another leader left."""
        ...

    async def discover(self) -> Sequence[Node]:
        """The machines as they are now, each without replicas."""
        ...

    def expect(self, runtime: Runtime) -> None:
        """A replica is to be made before long, of which model and where is not yet known."""
        ...

    def make_actor(self, config: DeploymentConfig, generation: str, place: Deployment) -> Actor:
        """A replica's actor, yet to be started."""
        ...


class ThisMachine:
    """A fleet of one."""

    outlives = False

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        objects: ObjectStore,
        runtimes: Runtimes,
        *,
        trusted: bool,
        places: bool,
        shares: bool = False,
    ) -> None:
        """`places`: whether replicas are told where to be, or are where their options say.

        `shares`: whether it is for others to answer clients who ask for a checkpoint's files.
        """
        self._settings = settings
        self._broker = broker
        self._objects = objects
        self._runtimes = runtimes
        self._trusted = trusted
        self._places = places
        self._shares = shares
        self._weights = Weights()
        self._blanks = Blanks()
        self._driver = Driver()
        self._looked: Looked | None = None
        self._looking = asyncio.Lock()
        self._cards: LocalCards | None = None
        """Chooses GPUs where nothing is placed."""
        self._gpu_watch: GpuWatch | None = None
        self.lost = asyncio.Event()

    async def connect(self, waiting: Callable[[], None]) -> None:
        """See `Fleet.connect`."""

    async def close(self) -> None:
        """See `Fleet.close`."""
        await self._blanks.stop()
        if self._cards is not None:
            await self._cards.close()
        await self._driver.close()

    def expect(self, runtime: Runtime) -> None:
        """See `Fleet.expect`."""
        self._blanks.prepare(runtime)

    async def living(self) -> list[Living]:
        """See `Fleet.living`."""
        return []

    async def discover(self) -> list[Node]:
        """See `Fleet.discover`: as it is declared or was found to be, once.

        A look that fails must not empty it.
        """
        async with self._looking:
            if self._looked is None:
                self._looked = await self._look()
        return [self._looked.node]

    async def _look(self) -> Looked:
        """Look at this machine, and have ready what its GPUs need."""
        find = look if self._places else look_around
        looked = await find(self._settings, self._driver)
        found, sizes = looked.gpus, looked.node.resources.gpu_bytes
        self._blanks.devices = found.variable
        if not found.gpus:
            await self._driver.close()
        elif self._places:
            self._gpu_watch = GpuWatch(self._driver, found.gpus, sizes)
        else:
            trusted = self._trusted
            self._cards = LocalCards(self._settings, self._driver, found.gpus, trusted=trusted)
        return looked

    def make_actor(
        self, config: DeploymentConfig, generation: str, place: Deployment
    ) -> ModelActor:
        """See `Fleet.make_actor`."""
        runtime = self._runtimes.installed()[generation]
        cards = self._cards
        has_gpus = self._looked is not None and self._looked.has_gpus
        on_cpu = self._places and (place.on_cpu or not has_gpus)
        return ModelActor(
            config,
            runtime,
            self._settings,
            self._broker,
            self._objects,
            self._weights,
            self._blanks,
            untrusted=not self._trusted,
            gpu_mem_bytes_by_id=place.gpu_mem_bytes_by_id if self._places and not on_cpu else None,
            device="cpu" if on_cpu else None,
            shares=self._shares,
            context_bytes=self._looked.node.resources.context_bytes if self._looked else 0,
            chosen=None if cards is None else lambda: cards.chosen(config, runtime),
            gpu_watch=self._gpu_watch,
            near=self._near,
        )

    def _near(self, indices: Collection[int]) -> frozenset[int] | None:
        """Choose the CPUs beside these GPUs."""
        if self._looked is None:
            return None
        here = self._looked.gpus.gpus
        nodes = [here[index].numa_node for index in indices]
        return numa.near(nodes, numa.cpus_by_node(), frozenset(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Looked:
    """This machine, as it is declared or was found to be."""

    node: Node
    gpus: Visible
    """GPUs of the machine that are here, in the order in which the node counts them."""

    @property
    def has_gpus(self) -> bool:
        """Return True if the GPUs that the node counts on are here: else models run on the CPU."""
        return bool(self.gpus.gpus)


async def look_around(settings: Settings, driver: Driver) -> Looked:
    """Find out about this machine where nothing is placed, and all GPUs are there for whoever runs here."""
    found = await _found(driver)
    resources = Resources.of((), machine.cpu_memory(), settings.model_cache_percentage)
    return Looked(Node("local", machine.name(), resources), found)


async def look(settings: Settings, driver: Driver) -> Looked:
    """Find out about this machine. Where GPUs are only declared, what is placed on them runs on the CPU."""
    found = await _found(driver)
    declared = parse_gpus(settings.node_gpus)
    if settings.node_gpus:
        if len(declared) > len(found.gpus):
            logger.warning(
                "%d GPUs are declared (NDIF_NODE_GPUS) and %d are here: what is placed on them runs on "
                "the CPU",
                len(declared),
                len(found.gpus),
            )
            found = Visible()
        used, sizes = found.gpus[: len(declared)], declared
    else:
        used = tuple(gpu for gpu in found.gpus if gpu.usable_bytes is not None)
        sizes = tuple(gpu.usable_bytes or 0 for gpu in used)
        for gpu in found.gpus:
            if gpu not in used:
                logger.warning("%s", without_memory(gpu))
    memory = settings.node_cpu_memory
    cpu = size(memory) if memory else machine.cpu_memory()
    uuids = [gpu.uuid for gpu in used]
    # Whose key is trusted is known where keys are: a node of a cluster has none.
    trusted = settings.api_keys is not None or bool(settings.ray_address)
    contexts = context_bytes(settings, untrusted=True, trusted=trusted) if used else 0
    resources = Resources.of(sizes, cpu, settings.model_cache_percentage, uuids, contexts)
    return Looked(Node("local", machine.name(), resources), Visible(used))


async def _found(driver: Driver) -> Visible:
    found = await gpus.look(driver, os.environ)
    for note in found.notes:
        logger.warning("%s", note)
    return found
