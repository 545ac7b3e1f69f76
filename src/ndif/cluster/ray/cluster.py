"""The Ray cluster, for whoever leads: connected to once, and lost once.

A process that has lost its cluster ends, and its supervisor starts it anew: Ray ends it in any case when
its head has been silent for a minute (RAY_gcs_rpc_server_reconnect_timeout_s). Replicas outlive it, and so
does what they run; the next leader finds them by `living`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ndif.cluster.asking import Living
from ndif.cluster.deployment import Deployment
from ndif.cluster.level import DeploymentLevel
from ndif.cluster.node import Node
from ndif.cluster.ray_actors import RayActor
from ndif.cluster.ray_calls import aside
from ndif.cluster.ray_nodes import nodes_of
from ndif.host.port import ReplicaLostError
from ndif.host.replica import Replica
from ndif.host.runtimes import Runtime
from ndif.schema.deployment import DeploymentConfig
from ndif.stores.broker.redis_lanes import Lanes
from ndif.tasks import within

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE = "NDIF"
_PREFIX = "ModelActor:"
_CONNECT_S = 2.0
_LOOK_S = 1.0
_PATIENCE_S = 10.0
"""A head that is silent for longer counts as gone."""
_DESCRIBE_S = 10.0
_AT_ONCE = 10_000
"""Calls that a replica takes at a time: it does one thing, and others wait."""


class ClusterError(Exception):
    """The cluster cannot be reached; the message says why, in a sentence."""


class RayCluster:
    """A cluster's nodes and replicas, as a `Controller` wants them."""

    outlives = True

    def __init__(self, address: str, replica: type[Replica], lanes: Lanes) -> None:
        """`address`: of its head, `host:port`, or `auto`; `replica`: what is started on its nodes.

        `lanes`: on which jobs go there.
        """
        self.lost = asyncio.Event()
        """Set once the cluster is out of reach for good."""
        self._address = address
        self._replica = replica
        self._lanes = lanes
        self._nodes: list[Node] = []
        self._whereabouts: dict[str, RayActor] = {}
        self._actors: list[RayActor] = []
        self._looking: asyncio.Task[None] | None = None

    async def connect(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Return once this process belongs to the cluster; `waiting` is called each time that it cannot."""
        while True:
            try:
                await self._connect()
            except ClusterError as error:
                logger.warning("%s; it is tried again", error)
                waiting()
                await asyncio.sleep(_CONNECT_S)
            else:
                break
        self._looking = asyncio.create_task(self._look_forever(), name="look at the cluster")
        self._lanes.start()

    async def _connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            await self._knock()
            await aside(
                lambda: ray.init(
                    self._address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level=logging.ERROR,
                )
            )
        except (
            RayError,
            ConnectionError,
            RuntimeError,
            ValueError,
            OSError,
            TimeoutError,
        ) as error:
            with contextlib.suppress(Exception):
                await aside(ray.shutdown)
            raise ClusterError(
                f"the Ray cluster at {self._address} cannot be reached: {str(error) or 'no answer'}"
            ) from error

    async def _knock(self) -> None:
        """See that somebody listens: where nobody does, Ray says so after half a minute.

        Raises:
            OSError: if nobody does.
        """
        parts = urlsplit(self._address if "//" in self._address else f"//{self._address}")
        if parts.hostname is None or parts.port is None:  # `auto`
            return
        connecting = asyncio.open_connection(parts.hostname, parts.port)
        _, writer = await within(connecting, _PATIENCE_S)
        writer.close()

    async def close(self) -> None:
        """Leave the cluster; its replicas stay."""
        if self._looking is not None:
            self._looking.cancel()
        await self._lanes.stop()
        for actor in self._actors:
            actor.leave()
        await aside(ray.shutdown)

    # What a controller asks

    async def discover(self) -> list[Node]:
        """The nodes that take models: as they were, where a look at them fails."""
        with contextlib.suppress(ClusterError):
            await self._look()
        return self._nodes

    def expect(self, runtime: Runtime) -> None:
        """See `Fleet.expect`. Of which node is not known: nothing starts there."""

    def make_actor(self, config: DeploymentConfig, generation: str, place: Deployment) -> RayActor:
        """A replica's actor. See `MakeActor`."""
        held = {field.name: getattr(place, field.name) for field in fields(place)}
        del held["level"]  # as it is, says the replica itself
        gpus = [node.resources.gpu_uuids for node in self._nodes if node.id == place.node_id]
        said = {
            "config": asdict(config),
            "generation": generation,
            "place": held,
            "gpus": [*gpus[0]] if gpus else [],
        }
        options = {
            "name": place.name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": 0,
            "num_gpus": 0,
            # A lost one is for the controller to replace.
            "max_restarts": 0,
            "max_concurrency": _AT_ONCE,
            # Of its calls Ray's head keeps no history: what jobs there were says this server's own.
            "enable_task_events": False,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(place.node_id, soft=False),
            # Which GPUs a replica uses is said to it, and not by what it can see.
            "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
        }
        kind = ray.remote(self._replica)
        return self._keep(
            RayActor(
                place.name,
                lambda: kind.options(**options).remote(said),
                self._lanes,
                self._whereabouts,
            )
        )

    def _keep(self, actor: RayActor) -> RayActor:
        self._actors = [*(one for one in self._actors if not one.ended.is_set()), actor]
        return actor

    # What another leader left

    async def living(self) -> list[Living]:
        """The replicas there are; those that nobody can use any more are ended."""
        named = await self._do(lambda: list_named_actors(all_namespaces=True))
        names = [
            one["name"]
            for one in named
            if one["namespace"] == NAMESPACE and one["name"].startswith(_PREFIX)
        ]
        found = await asyncio.gather(*(self._find(name) for name in names))
        return [one for one in found if one is not None]

    async def _find(self, name: str) -> Living | None:
        try:
            handle = await self._do(lambda: ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:  # it has ended since
            return None
        actor = self._keep(RayActor.found(name, handle, self._lanes, self._whereabouts))
        try:
            said = await within(actor.describe(), _DESCRIBE_S)
            living = None if said["ended"] or said["moving"] else _living(said, actor)
        except asyncio.TimeoutError:
            logger.warning("%s does not answer", name)
            living = None
        except (ReplicaLostError, RayError, KeyError, TypeError) as error:
            logger.warning("%s cannot be used: %s", name, error)
            living = None
        if living is None:
            await actor.stop()
            return None
        self._whereabouts.update(dict.fromkeys(said["requests"], actor))
        return living

    # How it is

    async def _look_forever(self) -> None:
        loop = asyncio.get_running_loop()
        seen = loop.time()
        while loop.time() - seen < _PATIENCE_S:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except ClusterError as error:
                logger.warning("%s", error)
            else:
                seen = loop.time()
        logger.error("the Ray cluster at %s is lost", self._address)
        self.lost.set()

    async def _look(self) -> None:
        self._nodes = nodes_of(await self._do(ray.nodes))

    async def _do(self, work: Callable[[], T]) -> T:
        """What Ray's head answers, which may be silent: in a thread, and not for ever."""
        try:
            return await within(aside(work), _PATIENCE_S / 2)
        except asyncio.TimeoutError as error:
            raise ClusterError(f"the Ray cluster at {self._address} does not answer") from error
        except (RayError, RuntimeError, OSError) as error:
            raise ClusterError(f"the Ray cluster at {self._address}: {error}") from error


def _living(said: Mapping[str, Any], actor: RayActor) -> Living:
    """What a replica says of itself (`Replica.describe`)."""
    known = {field.name for field in fields(DeploymentConfig)}
    config = {name: value for name, value in said["config"].items() if name in known}
    level = DeploymentLevel(said["level"] or "HOT")
    deployment = Deployment(**said["place"], level=level)
    return Living(deployment, DeploymentConfig(**config), actor, said["level"] is not None)
