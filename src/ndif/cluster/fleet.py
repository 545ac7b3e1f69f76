"""The fleet: where replicas can be, and what makes one there: this machine, or a Ray cluster's nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from ndif.cluster.asking import Living
from ndif.cluster.deployment import Deployment
from ndif.cluster.node import Node
from ndif.cluster.resources import Resources, parse_gpus
from ndif.config import Settings
from ndif.host import machine
from ndif.host.actor import ModelActor
from ndif.host.blanks import Blanks
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
        self._node: Node | None = None
        self._has_gpus = False
        self.lost = asyncio.Event()

    async def connect(self, waiting: Callable[[], None]) -> None:
        """See `Fleet.connect`."""

    async def close(self) -> None:
        """See `Fleet.close`."""
        await self._blanks.stop()

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
        if self._node is None:
            self._node, self._has_gpus = await look(self._settings, use_gpus=self._places)
        return [self._node]

    def make_actor(
        self, config: DeploymentConfig, generation: str, place: Deployment
    ) -> ModelActor:
        """See `Fleet.make_actor`."""
        on_cpu = self._places and (place.on_cpu or not self._has_gpus)
        return ModelActor(
            config,
            self._runtimes.installed()[generation],
            self._settings,
            self._broker,
            self._objects,
            self._weights,
            self._blanks,
            untrusted=not self._trusted,
            gpu_mem_bytes_by_id=place.gpu_mem_bytes_by_id if self._places and not on_cpu else None,
            device="cpu" if on_cpu else None,
            shares=self._shares,
        )


async def look(settings: Settings, *, use_gpus: bool = True) -> tuple[Node, bool]:
    """This machine, as it is declared or is found to be; and whether the GPUs it counts on are here.

    Where they are only declared, what is placed on them runs on the CPU. `use_gpus`: whether those that
    are found count.
    """
    found = await machine.gpus() if use_gpus else ()
    declared = settings.node_gpus
    gpus = parse_gpus(declared) if declared else found
    if len(gpus) > len(found):
        logger.warning(
            "%d GPUs are declared (NDIF_NODE_GPUS) and %d are here: what is placed on them runs on "
            "the CPU",
            len(gpus),
            len(found),
        )
    memory = settings.node_cpu_memory
    cpu = size(memory) if memory else machine.cpu_memory()
    resources = Resources.of(gpus, cpu, settings.model_cache_percentage)
    return Node("local", machine.name(), resources), len(found) >= len(gpus) > 0
