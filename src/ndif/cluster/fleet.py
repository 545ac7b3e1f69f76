"""Fleets of nodes that replicas run on. This machine is a fleet here, a Ray cluster in `ray/`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Protocol

from ndif.cluster.controller_types import OrphanReplica
from ndif.config.groups import DownloadSettings, PlacementSettings
from ndif.config.settings import Settings
from ndif.config.units import parse_gpus, parse_limit, read_size
from ndif.host import gpus
from ndif.host.environment import cpu_memory, cpus_by_node, machine_name, nearby_cpus
from ndif.host.evaluation import EvaluationError, Evaluator, spec_of
from ndif.host.fork_server import ForkServers
from ndif.host.gpus import Driver, DriverError, Gpu, VisibleGpus, without_memory
from ndif.host.hub import DownloadError, download
from ndif.host.model_actor import HostResources, LocalModelActor, ReplicaDevices
from ndif.host.port import ActorError, ModelActor
from ndif.host.runner_pool import context_bytes
from ndif.host.runtimes import Runtime, Runtimes
from ndif.host.shared_weights import SharedWeights
from ndif.host.watchdogs import GpuWatch
from ndif.placement.node import Node
from ndif.placement.packing import fewest
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.runtime.weights.cache import CacheRules
from ndif.schema.deployment import Defaults, DeploymentConfig
from ndif.stores.accounts import may_trust
from ndif.stores.broker import Broker
from ndif.stores.objects import ObjectStore

logger = logging.getLogger(__name__)


class Protected(Protocol):
    """A port that returns the deployed and booked repositories."""

    def __call__(self) -> Collection[str]:
        """Return the current names."""


class Fleet(Protocol):
    """Nodes, and a factory of replicas on them."""

    outlives: bool
    """True if replicas keep running when the leader ends."""
    uses_placement: bool
    """True to measure and place models; False to load each model on the device that its options name."""
    lost: asyncio.Event
    """Set once the nodes are permanently out of reach."""
    fork_servers: ForkServers
    """Fork servers of the node that measures models."""
    protected: Protected
    """Repositories that stay in each node's cache of the Hub."""

    async def connect(self, waiting: Callable[[], None]) -> None:
        """Connect to the nodes; call `waiting` after each failed attempt."""

    async def close(self) -> None:
        """Disconnect from the nodes."""

    async def orphans(self) -> Sequence[OrphanReplica]:
        """Return the replicas that an earlier leader left running."""

    async def discover(self) -> Sequence[Node]:
        """Return the nodes that exist now, each without replicas."""

    def prepare(self, runtime: Runtime) -> None:
        """Prepare to measure models and to create replicas in this runtime, before any model is known."""

    def make_actor(
        self, config: DeploymentConfig, generation: str, place: PlacedReplica
    ) -> ModelActor:
        """Return the actor of a replica, not started yet."""

    async def fetch(self, config: DeploymentConfig, generation: str, node_id: str) -> None:
        """Download the files of a model to a node; raise an `ActorError` if that fails."""


@dataclass(eq=False)
class ThisMachine:
    """A `Fleet` of this machine alone.

    Owns the resources that its replicas share: weights, prewarmed processes and the GPU driver.
    """

    settings: Settings
    broker: Broker
    objects: ObjectStore
    runtimes: Runtimes
    _: KW_ONLY
    trusted: bool
    """True if users are trusted, so that runners are not sandboxed."""
    uses_placement: bool
    """True if the controller chooses devices; False if the options of a model do."""
    shares: bool = False
    """True if another process serves the files of checkpoints to clients."""
    outlives: bool = field(init=False, default=False)
    lost: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    fork_servers: ForkServers = field(init=False, default_factory=ForkServers)
    protected: Protected = field(init=False, default=tuple)
    _weights: SharedWeights = field(init=False, default_factory=SharedWeights)
    _driver: Driver = field(init=False, default_factory=Driver)
    _inspecting: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _machine: LocalMachine | None = field(init=False, default=None)
    _cards: LocalCards | None = field(init=False, default=None)
    _gpu_watch: GpuWatch | None = field(init=False, default=None)

    async def connect(self, waiting: Callable[[], None]) -> None:
        """Do nothing; see `Fleet.connect`."""

    async def close(self) -> None:
        """Stop the fork servers and the driver; see `Fleet.close`."""
        self.fork_servers.stop()
        if self._cards is not None:
            await self._cards.close()
        await self._driver.close()

    def prepare(self, runtime: Runtime) -> None:
        """Start the fork server of the runtime; see `Fleet.prepare`."""
        # A controller that places models has them measured in processes without secrets.
        self.fork_servers.prepare(runtime, untrusted=self.uses_placement or not self.trusted)

    async def orphans(self) -> list[OrphanReplica]:
        """Return an empty list: no replica outlives the server."""
        return []

    async def discover(self) -> list[Node]:
        """Return this machine as first inspected, so that a later failure does not empty it."""
        async with self._inspecting:
            if self._machine is None:
                self._machine = await self._inspect()
        return [self._machine.node]

    async def _inspect(self) -> LocalMachine:
        """Inspect this machine, and prepare to watch its GPUs or to choose among them."""
        find = inspect_machine if self.uses_placement else inspect_unplaced
        machine = await find(self.settings, self._driver)
        visible, sizes = machine.gpus, machine.node.resources.gpu_bytes
        self.fork_servers.devices = visible.variable
        if not visible.gpus:
            await self._driver.close()
        elif self.uses_placement:
            self._gpu_watch = GpuWatch(self._driver, visible.gpus, sizes)
        else:
            self._cards = LocalCards(
                self.settings, self._driver, visible.gpus, self.fork_servers, trusted=self.trusted
            )
        return machine

    def make_actor(
        self, config: DeploymentConfig, generation: str, place: PlacedReplica
    ) -> LocalModelActor:
        """Return the actor of a replica; see `Fleet.make_actor`."""
        runtime, cards, machine = self.runtimes.installed()[generation], self._cards, self._machine
        has_gpus = machine is not None and machine.has_gpus
        on_cpu = self.uses_placement and (place.on_cpu or not has_gpus)
        host = HostResources(
            self._weights, self.fork_servers, self._gpu_watch, self._cache_rules, self.shares
        )
        devices = ReplicaDevices(
            gpu_mem_bytes_by_id=place.gpu_mem_bytes_by_id
            if self.uses_placement and not on_cpu
            else {},
            context_bytes=machine.node.resources.context_bytes if machine else 0,
            device="cpu" if on_cpu else None,
            chosen=partial(cards.chosen, config, runtime) if cards else contextlib.nullcontext,
            near=self._near,
        )
        return LocalModelActor(
            config,
            runtime,
            self.settings,
            self.broker,
            self.objects,
            host,
            devices,
            untrusted=not self.trusted,
        )

    def _cache_rules(self) -> CacheRules:
        return CacheRules(parse_limit(self.settings.cache_bytes), tuple(self.protected()))

    async def fetch(self, config: DeploymentConfig, generation: str, node_id: str) -> None:
        await fetch(config, generation, self.settings, self.runtimes, self.protected())

    def _near(self, indices: Collection[int]) -> frozenset[int] | None:
        if self._machine is None:
            return None
        nodes = [self._machine.gpus.gpus[index].numa_node for index in indices]
        return nearby_cpus(nodes, cpus_by_node(), frozenset(os.sched_getaffinity(0)))


async def fetch(
    config: DeploymentConfig,
    generation: str,
    settings: DownloadSettings,
    runtimes: Runtimes,
    protected: Collection[str],
) -> None:
    """Download the files of a model to this machine, or raise an `ActorError`."""
    spec = spec_of(config, generation, pickled=bool(settings.allow_pickled_weights))
    if spec.is_folder:
        return
    rules = CacheRules(parse_limit(settings.cache_bytes), tuple(protected))
    try:
        await download(spec, runtimes.installed()[generation], lambda loaded, total: None, rules)
    except DownloadError as error:
        raise ActorError(str(error)) from error


def choose(
    total: Sequence[int], free: Sequence[int], size_bytes: int, context: int
) -> dict[int, int] | None:
    """Return the fewest GPUs whose free memory holds a model, with the bytes of each for its tensors.

    A single GPU is granted in full, since other programs may free theirs. Several GPUs give only their free
    bytes, because the model is divided by these sizes. None if all GPUs together do not hold the model.
    """
    room = [max(0, free_bytes - context) for free_bytes in free]
    chosen = fewest(((free_bytes, index) for index, free_bytes in enumerate(room)), size_bytes)
    if len(chosen) == 1:
        return {chosen[0]: total[chosen[0]] - context}
    return {index: room[index] for index in chosen} or None


class LocalCards:
    """The choice of GPUs for each replica of a local server.

    Gets the free memory from the driver and a model's size from an evaluator, and reserves the memory of
    replicas that still load. A model is spread over all GPUs if its size or the free memory is unknown, if
    all GPUs together do not hold it, or if torch finds no GPU.
    """

    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        gpus: Sequence[Gpu],
        fork_servers: ForkServers,
        *,
        trusted: bool,
    ) -> None:
        """Prepare to choose among `gpus`, in the order of torch's indices."""
        self._driver = driver
        self._gpus = gpus
        self._context = context_bytes(settings, untrusted=not trusted, trusted=trusted)
        self._evaluator = Evaluator(
            fork_servers=fork_servers,
            look_for_cuda=True,
            sandbox="best-effort" if trusted else settings.sandbox,
            pickled=bool(settings.allow_pickled_weights),
            defaults=Defaults.of(settings),
            untrusted=not trusted,
        )
        self._loading: Counter[int] = Counter()
        """Bytes of each GPU that are reserved for loading replicas."""

    @contextlib.asynccontextmanager
    async def chosen(
        self, config: DeploymentConfig, runtime: Runtime
    ) -> AsyncIterator[Mapping[int, int] | None]:
        """Choose GPUs for a replica, and reserve them while it loads."""
        if len(self._gpus) < 2 or config.device is not None:
            yield None
            return
        claimed: Counter[int] = Counter()
        memory = None
        try:
            measured = await self._evaluator(config, runtime)
            free = await self._free_bytes()
            total = [gpu.usable_bytes or 0 for gpu in self._gpus]
            if measured.cuda:
                memory = choose(total, free, measured.size_bytes, self._context)
            for index in memory or ():
                claimed[index] = measured.size_bytes // len(memory or ()) + self._context
        except (EvaluationError, DriverError) as error:
            logger.warning("the model is spread over all GPUs: %s", error)
        self._loading += claimed
        try:
            yield memory
        finally:
            self._loading -= claimed

    async def _free_bytes(self) -> list[int]:
        """Return the free, unreserved bytes of each GPU; raise a `DriverError` if the driver fails."""
        cards, _ = await self._driver.physical_gpus()
        free = {card.gpu.uuid: card.gpu.free_bytes for card in cards}
        left = [free.get(gpu.uuid, 0) - self._loading[i] for i, gpu in enumerate(self._gpus)]
        return [max(0, free_bytes) for free_bytes in left]

    async def close(self) -> None:
        """End the evaluator."""
        await self._evaluator.stop()


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """This machine, as declared or detected."""

    node: Node
    gpus: VisibleGpus
    """The present GPUs, in the order of the node's indices."""

    @property
    def has_gpus(self) -> bool:
        """Return True if the GPUs of the node are present; otherwise models run on the CPU."""
        return bool(self.gpus.gpus)


async def inspect_unplaced(settings: PlacementSettings, driver: Driver) -> LocalMachine:
    """Inspect this machine for a server without placement, whose replicas share all GPUs."""
    visible = await _visible_gpus(driver)
    resources = Resources.of((), cpu_memory(), settings.model_cache_percentage)
    return LocalMachine(Node("local", machine_name(), resources), visible)


async def inspect_machine(settings: Settings, driver: Driver) -> LocalMachine:
    """Inspect this machine. Replicas on GPUs that are declared but absent run on the CPU."""
    visible = await _visible_gpus(driver)
    declared = parse_gpus(settings.node_gpus)
    if settings.node_gpus:
        if len(declared) > len(visible.gpus):
            logger.warning(
                "%d GPUs are declared (NDIF_NODE_GPUS) and %d are present: replicas on them run on the CPU",
                len(declared),
                len(visible.gpus),
            )
            visible = VisibleGpus()
        used, sizes = visible.gpus[: len(declared)], declared
    else:
        used = tuple(gpu for gpu in visible.gpus if gpu.usable_bytes is not None)
        sizes = tuple(gpu.usable_bytes or 0 for gpu in used)
        for gpu in visible.gpus:
            if gpu not in used:
                logger.warning("%s", without_memory(gpu))
    memory = settings.node_cpu_memory
    cpu = read_size(memory) if memory else cpu_memory()
    uuids = [gpu.uuid for gpu in used]
    # A file of keys may change, and a cluster's node has no keys: in both cases a key may be trusted later.
    trusted = settings.api_keys is not None or may_trust(settings) or bool(settings.ray_address)
    contexts = context_bytes(settings, untrusted=True, trusted=trusted) if used else 0
    resources = Resources.of(sizes, cpu, settings.model_cache_percentage, uuids, contexts)
    return LocalMachine(Node("local", machine_name(), resources), VisibleGpus(used))


async def _visible_gpus(driver: Driver) -> VisibleGpus:
    visible = await gpus.find_gpus(driver, os.environ)
    for note in visible.notes:
        logger.warning("%s", note)
    return visible
