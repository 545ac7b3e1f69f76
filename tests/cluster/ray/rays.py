"""A Ray cluster whose nodes run models, and the client side of its jobs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec

import uvloop

from ndif.cluster.ray.actors import RayModelActor
from ndif.cluster.ray.cluster import RayCluster, declaration
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import Variant
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.states import DeploymentLevel
from ndif.schema.status import Status
from ndif.server.node_actor import NodeActor
from ndif.stores.broker import Broker
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.redis.job_channels import JobSender
from ndif.stores.broker.signing import digest
from ndif.stores.objects import FileStore, ObjectStore
from tests import frames
from tests.services.ray import RayServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import PATIENCE_S

P = ParamSpec("P")
GIB = 1 << 30
OFFERED = Resources.of([], 4 * GIB, 1.0)


@contextlib.asynccontextmanager
async def driving(server: RayServer, replica: type = NodeActor) -> AsyncIterator[RayCluster]:
    """Connect as a leader does; yield the cluster."""
    with tempfile.TemporaryDirectory() as folder:
        objects = FileStore(Path(folder), 0)  # keeps no files
        broker = RedisBroker(server.environment["NDIF_BROKER_URL"], objects, SIGNER, inline_bytes=0)
        cluster = RayCluster(server.address, replica, JobSender(broker))
        await cluster.connect()
        try:
            yield cluster
        finally:
            await cluster.close()
            await broker.stop()


def config_of(checkpoint: Path) -> DeploymentConfig:
    return DeploymentConfig("test/model", str(checkpoint), task="text-generation")


def place_on(node_id: str, config: DeploymentConfig, replica_id: str) -> PlacedReplica:
    return PlacedReplica(
        model_key=str(Variant(config.key, "0.8")),
        replica_id=replica_id,
        node_id=node_id,
        level=DeploymentLevel.HOT,
        size_bytes=GIB,
        deployed=0.0,
        on_cpu=True,
    )


async def node_called(cluster: RayCluster, name: str) -> str:
    """Return the id of the node of that name."""
    return next(node.id for node in await cluster.discover() if node.name == name)


async def an_actor(
    cluster: RayCluster, config: DeploymentConfig, node: str, replica_id: str
) -> RayModelActor:
    """Return an actor that is not started."""
    place = place_on(await node_called(cluster, node), config, replica_id)
    return cluster.make_actor(config, "0.8", place)


def a_request(
    payload: bytes = b"", subscription_id: str | None = "me", *, trusted: bool = True
) -> Request:
    key = DeploymentConfig("test/model", "").key
    return Request(
        key,
        "0.8",
        Wire.ENVELOPE,
        payload,
        False,
        "http://here",
        subscription_id=subscription_id,
        trusted=trusted,
    )


@contextlib.asynccontextmanager
async def a_replica(
    cluster: RayCluster,
    checkpoint: Path,
    node: str = "one",
    replica_id: str = "r1",
    silent_s: float = PATIENCE_S,
) -> AsyncIterator[RayModelActor]:
    """Yield a started actor; stop it at the end."""
    actor = await an_actor(cluster, config_of(checkpoint), node, replica_id)
    actor.silent_s = silent_s
    try:
        await actor.start(lambda loaded, total: None)
        yield actor
    finally:
        await actor.stop()


class Client:
    """A client's requests, and the responses to them."""

    def __init__(self, broker: Broker, session: Any) -> None:
        self._broker = broker
        self._session = session
        self.responses: dict[str, list[Response]] = {}
        self._heard = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    async def send(self, payload: bytes, *, trusted: bool = True) -> Request:
        request = a_request(payload, self._session.id, trusted=trusted)
        await self._broker.submit(request)
        return replace(request, digest=digest(payload))  # a claimed request has its digest

    async def until(self, request: Request, status: Status) -> Response:
        while True:
            for response in self.responses.get(request.id, []):
                if response.status is status:
                    return response
                assert not response.status.terminal, response
            self._heard.clear()
            await self._heard.wait()

    async def _listen(self) -> None:
        while True:
            response = frames.read(await self._session.next())
            self.responses.setdefault(response.id, []).append(response)
            self._heard.set()

    def close(self) -> None:
        self._listening.cancel()


@contextlib.asynccontextmanager
async def a_client(url: str, objects: ObjectStore) -> AsyncIterator[Client]:
    broker = RedisBroker(url, objects, SIGNER, inline_bytes=1 << 20)
    await broker.start()
    client = Client(broker, await broker.subscribe())
    yield client
    client.close()
    await broker.stop()


@contextlib.contextmanager
def ray_cluster(
    environment: Mapping[str, str],
    *nodes: str,
    head: Mapping[str, str] | None = None,
    resources: Mapping[str, int] | None = None,
) -> Iterator[RayServer]:
    """Yield a cluster of a head and these nodes; `head` and `resources` are for the head only."""
    # Nodes can import the tests' modules, too.
    path = os.pathsep.join(
        [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with RayServer({"PYTHONPATH": path, **environment}, head, resources) as server:
        for name in nodes:
            server.add(name, declaration(OFFERED))
        yield server


def as_a_leader(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a coroutine on uvloop, as a leader does, within the patience that Ray needs on a busy machine."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            await asyncio.wait_for(test(*args, **kwargs), PATIENCE_S)

        uvloop.run(whole())

    return run


async def nothing(_: Response) -> bool:
    """Accept a response: the replica delivers it to its client itself."""
    return True
