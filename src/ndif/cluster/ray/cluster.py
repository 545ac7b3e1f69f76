"""The leader's connection to a Ray cluster, which is not restored after a loss.

A process that has lost its cluster ends, and its supervisor restarts it. Ray in any case ends a process
whose head has not answered for a minute (RAY_gcs_rpc_server_reconnect_timeout_s). Replicas and their jobs
outlive the process; the next leader finds them with `orphans`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ndif.cluster.controller_types import OrphanReplica
from ndif.cluster.fleet import Protected
from ndif.cluster.ray.actors import RayModelActor
from ndif.cluster.remote_actor import RemoteActor, ReplicaOrder
from ndif.config.short_ids import unique_length
from ndif.host.fork_server import ForkServers
from ndif.host.port import ActorError, ReplicaLostError
from ndif.host.runtimes import Runtime
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.runtime.typed_json import to_json
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.states import DeploymentLevel
from ndif.stores.broker.redis.job_channels import JobSender
from ndif.stores.broker.signing import PROTOCOL
from ndif.tasks import in_daemon_thread, within

HEAD: Mapping[str, int] = {"head": 1}
"""Resource that marks the head of a cluster, in addition to any memory that it offers to models."""

_CPU = "ndif_cpu_memory"
_GPU = "ndif_gpu_{}"
_CONTEXT = "ndif_gpu_context"
_UUID = re.compile(r"ndif_gpu_(\d+)_is_(.+)", re.ASCII)


def declaration(resources: Resources) -> dict[str, int]:
    """Return a node's resources for Ray: the bytes of CPU memory and GPUs for models, and GPU UUIDs."""
    gpus = {_GPU.format(index): size for index, size in enumerate(resources.gpu_bytes)}
    # Ray stores only a name and a number for a custom resource, so the name contains the UUID.
    names = {
        f"{_GPU.format(index)}_is_{uuid}": 1
        for index, uuid in enumerate(resources.gpu_uuids)
        if uuid is not None
    }
    context = {_CONTEXT: resources.context_bytes} if resources.context_bytes else {}
    return {_CPU: resources.cpu_bytes, **gpus, **names, **context}


def resources_of(declared: Mapping[str, float]) -> Resources | None:
    """Return the memory that a node declared for models; None if the node offers no memory."""
    # Ray does not list resources of 0.
    gpus: list[int] = []
    while size := int(declared.get(_GPU.format(len(gpus)), 0)):
        gpus.append(size)
    cpu = int(declared.get(_CPU, 0))
    named = {int(match[1]): match[2] for name in declared if (match := _UUID.fullmatch(name))}
    uuids = [named.get(index) for index in range(len(gpus))]
    context = int(declared.get(_CONTEXT, 0))
    return Resources.of(gpus, cpu, 1.0, uuids, context) if cpu or gpus else None


def nodes_of(table: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Return the nodes in `ray.nodes()` that are alive and offer memory to models.

    If nodes share a name, such as containers of one image, the beginning of the id is added to the name.
    """
    nodes = [
        Node(entry["NodeID"], entry["NodeName"] or entry["NodeManagerAddress"], resources)
        for entry in table
        if entry["Alive"] and (resources := resources_of(entry["Resources"])) is not None
    ]
    names = Counter(node.name for node in nodes)
    length = unique_length(node.id for node in nodes)
    return [
        replace(node, name=f"{node.name} ({node.id[:length]})") if names[node.name] > 1 else node
        for node in nodes
    ]


logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE = "NDIF"
_PREFIX = "ModelActor:"
_CONNECT_S = 2.0
_REFRESH_S = 1.0
_PATIENCE_S = 10.0
"""Seconds without an answer after which the head counts as lost."""
_DESCRIBE_S = 10.0
_AT_ONCE = 10_000
"""Maximum number of concurrent calls to a replica: the replica runs one job, and other calls wait."""


class ClusterError(Exception):
    """The cluster cannot be reached; the message is the reason."""


class RayCluster:
    """A `Fleet` of the nodes of a Ray cluster.

    Owns the connection to Ray and an actor for each replica. The controller decides which replicas are
    started, and Ray starts their processes (`ndif.cluster.remote_actor`) on the nodes.
    """

    outlives = True
    uses_placement = True

    def __init__(self, address: str, replica: type[RemoteActor], job_sender: JobSender) -> None:
        """Prepare a connection to the head at `host:port`, or `auto`; Ray runs `replica` on the nodes."""
        self.fork_servers = ForkServers()
        self.protected: Protected = tuple
        self.lost = asyncio.Event()
        """Set once the connection is permanently lost."""
        self._address = address
        self._replica = replica
        self._job_sender = job_sender
        self._nodes: list[Node] = []
        self._whereabouts: dict[str, RayModelActor] = {}
        self._actors: list[RayModelActor] = []
        self._watching: asyncio.Task[None] | None = None

    async def connect(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Join the cluster; call `waiting` after each failed attempt."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        while True:
            try:
                await self._connect()
                break
            except (RayError, RuntimeError, ValueError, OSError, asyncio.TimeoutError) as error:
                with contextlib.suppress(Exception):
                    await in_daemon_thread(ray.shutdown)
                logger.warning(
                    "the Ray cluster at %s cannot be reached: %s; retrying",
                    self._address,
                    str(error) or "no answer",
                )
                waiting()
                await asyncio.sleep(_CONNECT_S)
        self._watching = asyncio.create_task(self._watch_nodes(), name="watch over the cluster")
        self._job_sender.start()

    async def _connect(self) -> None:
        parts = urlsplit(self._address if "//" in self._address else f"//{self._address}")
        if parts.hostname is not None and parts.port is not None:  # otherwise the address is `auto`
            # Ray needs half a minute to report that its head does not listen.
            connecting = asyncio.open_connection(parts.hostname, parts.port)
            _, writer = await within(connecting, _PATIENCE_S)
            writer.close()
        await in_daemon_thread(
            lambda: ray.init(
                self._address,
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        )

    async def close(self) -> None:
        """Leave the cluster; the replicas keep running."""
        if self._watching is not None:
            self._watching.cancel()
        self.fork_servers.stop()
        await self._job_sender.stop()
        for actor in self._actors:
            actor.leave()
        # Ray's own shutdown may never return; the thread ends with this process.
        with contextlib.suppress(asyncio.TimeoutError):
            await within(in_daemon_thread(ray.shutdown), _PATIENCE_S)

    # For the controller

    async def discover(self) -> list[Node]:
        """Return the nodes for models; if Ray does not answer, the last known nodes."""
        with contextlib.suppress(ClusterError):
            await self._refresh_nodes()
        return self._nodes

    def prepare(self, runtime: Runtime) -> None:
        """Start this process's fork server, which measures models; nodes need none. See `Fleet.prepare`."""
        self.fork_servers.prepare(runtime, untrusted=True)

    def make_actor(
        self, config: DeploymentConfig, generation: str, place: PlacedReplica
    ) -> RayModelActor:
        """Return the actor of a replica, not started yet. See `MakeActor`."""
        gpus = [node.resources.gpu_uuids for node in self._nodes if node.id == place.node_id]
        counted = gpus[0] if gpus else ()
        order = ReplicaOrder(config, generation, place, counted, tuple(self.protected()))
        options = {
            "name": place.name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_concurrency": _AT_ONCE,
            **_node_options(place.node_id),
            # The order names the replica's GPUs, so Ray must not hide any GPU.
            "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
        }
        kind = ray.remote(self._replica)
        return self._keep(
            RayModelActor(
                place.name,
                lambda: kind.options(**options).remote(to_json(order)),
                self._job_sender,
                self._whereabouts,
                node_id=place.node_id,
            )
        )

    async def fetch(self, config: DeploymentConfig, generation: str, node_id: str) -> None:
        """Download a model to a node with a temporary actor; see `Fleet.fetch`."""
        order = ReplicaOrder(config, generation, protected=tuple(self.protected()))
        kind = ray.remote(self._replica).options(**_node_options(node_id))
        try:
            handle = await in_daemon_thread(lambda: kind.remote(to_json(order)))
            try:
                problem = await handle.fetch.remote()
            finally:
                await in_daemon_thread(lambda: ray.kill(handle))
        except RayError as error:
            # Take the node's own error: the text of `error` also contains the traceback.
            problem = str(getattr(error, "cause", None) or error).strip().partition("\n")[0]
        if problem is not None:
            raise ActorError(problem)

    def _keep(self, actor: RayModelActor) -> RayModelActor:
        self._actors = [*(other for other in self._actors if not other.ended.is_set()), actor]
        return actor

    # Replicas of another leader

    async def orphans(self) -> list[OrphanReplica]:
        """Return the replicas that an earlier leader left; end unusable replicas."""
        named = await self._call_head(lambda: list_named_actors(all_namespaces=True))
        names = [entry["name"] for entry in named if entry["namespace"] == NAMESPACE]
        replicas = (self._find(name) for name in names if name.startswith(_PREFIX))
        return [orphan for orphan in await asyncio.gather(*replicas) if orphan is not None]

    async def _find(self, name: str) -> OrphanReplica | None:
        try:
            handle = await self._call_head(lambda: ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:  # the actor has ended meanwhile
            return None
        actor = self._keep(
            RayModelActor(name, lambda: handle, self._job_sender, self._whereabouts, handle)
        )
        try:
            described = await within(actor.describe(), _DESCRIBE_S)
            if described.protocol != PROTOCOL:
                logger.warning("%s belongs to another version of this server and is ended", name)
            elif not described.ended and not described.moving and described.order.place:
                level = described.level or DeploymentLevel.HOT
                placed = replace(described.order.place, level=level)
                actor.node_id = placed.node_id
                self._whereabouts.update(dict.fromkeys(described.requests, actor))
                config, is_up = described.order.config, described.level is not None
                return OrphanReplica(placed, config, actor, is_up)
        except asyncio.TimeoutError:
            logger.warning("%s does not answer", name)
        except (ReplicaLostError, RayError, AttributeError, TypeError, ValueError) as error:
            logger.warning("%s cannot be used: %s", name, error)
        await actor.stop()
        return None

    # State of the cluster

    async def _watch_nodes(self) -> None:
        loop = asyncio.get_running_loop()
        last_answer = loop.time()
        while loop.time() - last_answer < _PATIENCE_S:
            await asyncio.sleep(_REFRESH_S)
            try:
                await self._refresh_nodes()
            except ClusterError as error:
                logger.warning("%s", error)
            else:
                last_answer = loop.time()
        logger.error("the Ray cluster at %s is lost", self._address)
        self.lost.set()

    async def _refresh_nodes(self) -> None:
        table = await self._call_head(ray.nodes)
        self._nodes = nodes_of(table)
        dead = {entry["NodeID"] for entry in table if not entry["Alive"]}
        for actor in self._actors:
            if actor.node_id in dead and not actor.ended.is_set():
                actor.node_is_gone()

    async def _call_head(self, work: Callable[[], T]) -> T:
        """Call Ray's head from a thread, with a deadline; return the answer."""
        try:
            return await within(in_daemon_thread(work), _PATIENCE_S / 2)
        except asyncio.TimeoutError as error:
            raise ClusterError(f"the Ray cluster at {self._address} does not answer") from error
        except (RayError, RuntimeError, OSError) as error:
            raise ClusterError(f"the Ray cluster at {self._address}: {error}") from error


def _node_options(node_id: str) -> dict[str, Any]:
    """Return the options of an actor that may run only on this node."""
    return {
        "num_cpus": 0,
        "num_gpus": 0,
        # The controller replaces a lost replica.
        "max_restarts": 0,
        # Ray's head need not keep a history of calls: this server records its jobs itself.
        "enable_task_events": False,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
