"""Replicas on a real Ray cluster: a head and two nodes, with a real Redis and a real object store."""

from __future__ import annotations

import asyncio
import io
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from nnsight import TransformersModel

from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import ReplicaRequest
from ndif.cluster.models import Models
from ndif.cluster.ray import actors as actors_module
from ndif.cluster.ray.actors import RayModelActor
from ndif.cluster.ray.cluster import RayCluster
from ndif.host.evaluation import Measured
from ndif.host.port import ActorError, EndedError, ReplicaEvictedError, ReplicaLostError
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import Variant
from ndif.schema.request import Request
from ndif.schema.response import InlineResult, Response
from ndif.schema.states import DeploymentLevel
from ndif.schema.status import Status
from ndif.stores.objects import FileStore
from ndif.tasks import end, within
from tests.cluster.ray.rays import (
    GIB,
    Client,
    a_client,
    a_replica,
    a_request,
    an_actor,
    as_a_leader,
    config_of,
    driving,
    node_called,
    nothing,
    place_on,
    ray_cluster,
)
from tests.conftest import NAME, WIDE
from tests.host.stand_in import IS_LOADING, MODEL, Frozen, StandIn
from tests.runtime.replica import PROMPT, Sent, expected, lasting, reading, sleeping
from tests.services.ray import RayServer
from tests.services.redis import RedisServer
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer
from tests.waiting import PATIENCE_S, time_passes_async

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(tiny_gpt2: Path) -> TransformersModel:
    return TransformersModel(str(tiny_gpt2), task="text-generation")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FileStore:
    """The driver's object store, which holds only large requests."""
    return FileStore(tmp_path_factory.mktemp("objects"), 3600)


@pytest.fixture(scope="module")
def environment(
    redis: RedisServer,
    s3: SwiftServer,
    hub_url: str,
    tiny_gpt2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """The settings of every node; its cache fits one model."""
    size = sum(file.stat().st_size for file in tiny_gpt2.iterdir())
    return {
        "NDIF_CACHE_BYTES": str(size * 3 // 2),
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(tmp_path_factory.mktemp("hf")),
        "NDIF_BROKER_URL": redis.url,
        "NDIF_OBJECT_STORE_URL": s3.url,
        "NDIF_OBJECT_STORE_ACCESS_KEY": ACCESS_KEY,
        "NDIF_OBJECT_STORE_SECRET_KEY": SECRET_KEY,
        "NDIF_OBJECT_STORE_BUCKET": f"test-{uuid.uuid4()}",
        "NDIF_SESSION_ROOT": str(tmp_path_factory.mktemp("session")),
        "NDIF_RUNNER_POOL": "1",
    }


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[RayServer]:
    with ray_cluster(environment, "one", "two") as started:
        yield started


def large(client: TransformersModel) -> bytes:
    """Return a block with a result large enough for Ray's object store."""
    sent = Sent()
    with client.trace(PROMPT, backend=sent):
        logits = client.lm_head.output[0, -1].repeat(5000).save()  # noqa: F841
    return sent.payload


def weights_in(folder: str) -> list[Path]:
    """Return the weight files in a folder."""
    return [*Path(folder).rglob("model.safetensors")]


@asynccontextmanager
async def a_node_with_files(server: RayServer) -> AsyncIterator[tuple[RayCluster, str]]:
    """Yield a cluster and a node to which a model was downloaded."""
    async with driving(server) as cluster:
        node = await node_called(cluster, "two")
        await cluster.fetch(DeploymentConfig(NAME, NAME), "0.8", node)
        yield cluster, node


@as_a_leader
async def test_model_is_downloaded_to_node_before_placement(
    server: RayServer, environment: dict[str, str]
) -> None:
    async with a_node_with_files(server) as (cluster, node):
        assert weights_in(environment["HF_HOME"])
        for config, generation, problem in (
            (DeploymentConfig("no/model", "no/model"), "0.8", "There is no repository 'no/model'"),
            (
                DeploymentConfig(NAME, NAME),
                "0.5",
                "nnsight 0.5 is not installed on the replica.s node",
            ),
        ):
            with pytest.raises(ActorError, match=problem):
                await cluster.fetch(config, generation, node)
        with pytest.raises(ActorError):  # no such node
            await cluster.fetch(config, generation, "0" * 56)


@as_a_leader
async def test_node_deletes_files_that_leader_does_not_protect(
    server: RayServer, environment: dict[str, str]
) -> None:
    async with a_node_with_files(server) as (cluster, node):
        cluster.protected = lambda: [NAME]
        with pytest.raises(ActorError, match="NDIF_CACHE_BYTES"):
            await cluster.fetch(DeploymentConfig(WIDE, WIDE), "0.8", node)
        cluster.protected = tuple
        await cluster.fetch(DeploymentConfig(WIDE, WIDE), "0.8", node)
        assert len(weights_in(environment["HF_HOME"])) == 1


# With a model


@as_a_leader
async def test_traces_run_on_node(
    server: RayServer,
    redis: RedisServer,
    store: FileStore,
    tiny_gpt2: Path,
    client: TransformersModel,
) -> None:
    async with (
        driving(server) as cluster,
        a_client(redis.url, store) as user,
        a_replica(cluster, tiny_gpt2) as actor,
    ):
        assert actor.model.class_name == "GPT2LMHeadModel"
        for trusted in (True, False):
            request = await user.send(reading(client), trusted=trusted)
            response = await actor.run(request, nothing)
            assert (response.status, response.delivered) == (Status.COMPLETED, True)
            completed = await user.until(request, Status.COMPLETED)
            assert isinstance(completed.data, InlineResult)
            saves = torch.load(io.BytesIO(completed.data.content), weights_only=False)
            assert torch.equal(saves["logits"], expected(tiny_gpt2))
            statuses = [response.status for response in user.responses[request.id]]
            if Status.RUNNING in statuses:  # the end of a quick job may replace it
                assert statuses.pop(1) is Status.RUNNING
            assert statuses == [Status.DISPATCHED, Status.COMPLETED]

        response = await actor.run(await user.send(large(client)), nothing)
        assert (response.status, response.data) == (Status.COMPLETED, None)
        kept = "object_store_memory"
        assert ray.available_resources()[kept] == ray.cluster_resources()[kept]

        job = await user.send(lasting(client))
        running = asyncio.create_task(actor.run(job, nothing))
        await user.until(job, Status.LOG)
        actor.cancel("The client left.")
        assert (await running).description == "The client left."
        assert (await user.until(job, Status.ERROR)).description == "The client left."

        job = await user.send(lasting(client))
        running = asyncio.create_task(actor.run(job, nothing))
        await user.until(job, Status.LOG)
        await actor.to_cache()
        with pytest.raises(ReplicaEvictedError, match="taken off its device"):
            await running
        with pytest.raises(ReplicaEvictedError):
            await actor.run(job, nothing)
        await actor.from_cache({})
        request = await user.send(reading(client))
        assert (await actor.run(request, nothing)).status is Status.COMPLETED
        assert not actor.ended.is_set()


def deafen_others(redis: RedisServer) -> None:
    """Close the pub/sub connections of all other processes."""
    mine = {connection.laddr.port for connection in psutil.Process().net_connections()}
    for client in redis.command("client", "list", "type", "pubsub").splitlines():
        address = dict(part.partition("=")[::2] for part in client.split())["addr"]
        if int(address.rpartition(":")[2]) not in mine:
            redis.command("client", "kill", "addr", address)


@as_a_leader
async def test_message_lost_in_redis_is_recovered_by_ray_call(
    server: RayServer,
    redis: RedisServer,
    store: FileStore,
    tiny_gpt2: Path,
    client: TransformersModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    ask = RayModelActor._ask

    async def noting(actor: RayModelActor, method: str, *arguments: Any, **named: Any) -> Any:
        asked.append(method)
        return await ask(actor, method, *arguments, **named)

    monkeypatch.setattr(RayModelActor, "_ask", noting)
    async with (
        driving(server) as cluster,
        a_client(redis.url, store) as user,
        a_replica(cluster, tiny_gpt2) as actor,
    ):

        async def run(payload: bytes, until: Status | None = None) -> int:
            """Run a job, close connections at that status, and return the number of Ray's `run` calls."""
            asked.clear()
            request = await user.send(payload)
            if until is Status.QUEUED:
                deafen_others(redis)
            running = asyncio.create_task(actor.run(request, nothing))
            if until is Status.RUNNING:
                await user.until(request, until)
                redis.command("client", "kill", "type", "pubsub")
            response = await running
            assert (response.status, response.delivered) == (Status.COMPLETED, True)
            await user.until(request, Status.COMPLETED)
            statuses = [response.status for response in user.responses[request.id]]
            assert statuses.count(Status.RUNNING) <= 1
            return asked.count("run")

        async def until_quick() -> None:
            """Run jobs until one needs no call through Ray; a slow job on a slow machine needs one."""
            while await run(reading(client)):
                # Jobs without a listener return at once, so limit their number.
                soon_s = min(4.0, 1.5 * actors_module._SOON_S)
                monkeypatch.setattr(actors_module, "_SOON_S", soon_s)
                await time_passes_async(0.05)

        await until_quick()
        assert await run(reading(client), Status.QUEUED) == 1
        # Both ends reconnect eventually.
        await until_quick()
        # The end of the job is lost if it is sent while the leader is not listening.
        while not await run(sleeping(client, 0.25), Status.RUNNING):
            pass
        await until_quick()
        monkeypatch.setattr(actors_module, "_SOON_S", 0.5)
        assert await run(sleeping(client, 2 * actors_module._SOON_S)) == 1


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@as_a_leader
async def test_killed_or_frozen_worker_loses_replica_during_job(
    sent: signal.Signals,
    server: RayServer,
    redis: RedisServer,
    store: FileStore,
    tiny_gpt2: Path,
    client: TransformersModel,
) -> None:
    async with (
        driving(server) as cluster,
        a_client(redis.url, store) as user,
        a_replica(cluster, tiny_gpt2, silent_s=20.0) as actor,
    ):
        job = await user.send(lasting(client))
        running = asyncio.create_task(actor.run(job, nothing))
        await user.until(job, Status.LOG)
        (worker,) = server.workers("NodeActor")
        model_processes = worker.children(recursive=True)
        assert model_processes
        actor.silent_s = 3.0
        worker.send_signal(sent)
        with pytest.raises(ReplicaLostError) as lost:
            await within(running, PATIENCE_S)
        assert not isinstance(lost.value, ReplicaEvictedError)
        await actor.ended.wait()
        with pytest.raises(ReplicaLostError):
            await actor.run(job, nothing)
        _, left = await asyncio.to_thread(psutil.wait_procs, model_processes, PATIENCE_S)
        assert left == []


@as_a_leader
async def test_killed_model_process_loses_replica(
    server: RayServer,
    redis: RedisServer,
    store: FileStore,
    tiny_gpt2: Path,
    client: TransformersModel,
) -> None:
    async with (
        driving(server) as cluster,
        a_client(redis.url, store) as user,
        a_replica(cluster, tiny_gpt2) as actor,
    ):
        job = await user.send(lasting(client))
        running = asyncio.create_task(actor.run(job, nothing))
        await user.until(job, Status.LOG)
        (worker,) = server.workers("NodeActor")
        (zygote,) = [p for p in worker.children() if "ndif.runtime" in p.cmdline()]
        zygote.kill()
        with pytest.raises(ReplicaLostError):
            await running
        await actor.ended.wait()
        await actor.stop()
        await asyncio.to_thread(worker.wait, PATIENCE_S)


@as_a_leader
async def test_unloadable_checkpoint_leaves_no_orphan(server: RayServer, tmp_path: Path) -> None:
    async with driving(server) as cluster:
        with pytest.raises(ActorError, match="nothing-is-here"):
            async with a_replica(cluster, tmp_path / "nothing-is-here"):
                pass
        assert await cluster.orphans() == []


@as_a_leader
async def test_next_leader_adopts_replica_and_its_running_job(
    server: RayServer,
    redis: RedisServer,
    store: FileStore,
    tiny_gpt2: Path,
    client: TransformersModel,
) -> None:
    async with a_client(redis.url, store) as user:
        job = await user.send(lasting(client))
        await leave_running(server, tiny_gpt2, user, job, Status.LOG)
        async with driving(server) as cluster:
            models = Models()
            controller = Controller(models, cluster.make_actor, unmeasured, cluster.discover)
            await controller.discover()
            (hosted,) = controller.adopt(await cluster.orphans())
            assert hosted.serving
            assert hosted.actor.model.class_name == "GPT2LMHeadModel"
            assert [str(model.key) for model in models] == [str(config_of(tiny_gpt2).key)]
            (place,) = controller.cluster.replicas()
            assert (place.level, place.size_bytes, place.on_cpu) == (DeploymentLevel.HOT, GIB, True)
            assert place.deployed > 0

            # A run call to any replica waits for the job where it runs.
            async with a_replica(cluster, tiny_gpt2, "two", "second") as other:
                attached = asyncio.create_task(other.run(job, nothing))
                waiting = asyncio.create_task(
                    hosted.actor.run(await user.send(reading(client)), nothing)
                )
                await asyncio.wait([attached, waiting], timeout=1)
                assert not attached.done()
                assert not waiting.done()
                other.cancel("Enough.")
                assert (await attached).description == "Enough."
                assert (await waiting).status is Status.COMPLETED
            runs = [r for r in user.responses[job.id] if r.status is Status.RUNNING]
            assert len(runs) == 1
            await controller.stop()
            assert await cluster.orphans() == []


@as_a_leader
async def test_job_ended_under_previous_leader_is_not_run_again(
    server: RayServer,
    redis: RedisServer,
    store: FileStore,
    tiny_gpt2: Path,
    client: TransformersModel,
) -> None:
    async with a_client(redis.url, store) as user:
        job = await user.send(sleeping(client, 3.0))
        await leave_running(server, tiny_gpt2, user, job, Status.RUNNING)
        async with driving(server) as cluster:
            (left,) = await cluster.orphans()
            async with a_replica(cluster, tiny_gpt2, "two", "second") as other:
                await user.until(job, Status.COMPLETED)
                await asyncio.to_thread(kill_the_first, server)
                await left.actor.ended.wait()
                responses: list[Response] = []

                async def tell(response: Response) -> bool:
                    responses.append(response)
                    return True

                with pytest.raises(EndedError):
                    await other.run(job, tell)
                assert responses == []


async def leave_running(
    server: RayServer, checkpoint: Path, user: Client, job: Request, status: Status
) -> None:
    """Lead until a replica on the first node runs a job and its client has received this status."""
    async with driving(server) as cluster:
        actor = await an_actor(cluster, config_of(checkpoint), "one", "first")
        await actor.start(lambda loaded, total: None)
        running = asyncio.create_task(actor.run(job, nothing))
        await user.until(job, status)
        await end([running])  # as when a leader leaves or ends


def kill_the_first(server: RayServer) -> None:
    first, _ = sorted(server.workers("NodeActor"), key=lambda worker: worker.create_time())
    first.kill()


async def unmeasured(config: DeploymentConfig, generation: str) -> Measured:
    return Measured(GIB)


# Without a model


@as_a_leader
async def test_replica_on_missing_node_fails_to_start(server: RayServer, tiny_gpt2: Path) -> None:
    async with driving(server, StandIn) as cluster:
        config = config_of(tiny_gpt2)
        actor = cluster.make_actor(config, "0.8", place_on("ab" * 28, config, "nowhere"))
        with pytest.raises(ActorError, match="the node that it was placed on is gone"):
            await actor.start(lambda loaded, total: None)
        assert actor.ended.is_set()
        await actor.stop()


@as_a_leader
async def test_actor_frozen_before_first_answer_is_killed(
    server: RayServer, tiny_gpt2: Path
) -> None:
    async with driving(server, Frozen) as cluster:
        actor = await an_actor(cluster, config_of(tiny_gpt2), "one", "frozen")
        actor.made_s = 4.0
        with pytest.raises(ActorError, match="its process does not answer"):
            await actor.start(lambda loaded, total: None)
        assert actor.ended.is_set()
        _, left = await asyncio.to_thread(psutil.wait_procs, server.workers("Frozen"), PATIENCE_S)
        assert left == []
        assert await cluster.orphans() == []


@as_a_leader
async def test_actor_stopped_before_creation_leaves_no_orphan(
    server: RayServer, tiny_gpt2: Path
) -> None:
    async with driving(server, StandIn) as cluster:
        actor = await an_actor(cluster, config_of(tiny_gpt2), "one", "brief")
        starting = asyncio.create_task(actor.start(lambda loaded, total: None))
        await asyncio.sleep(0)
        await actor.stop()
        with pytest.raises(ActorError):
            await starting
        assert actor.ended.is_set()
        assert await cluster.orphans() == []
        never = await an_actor(cluster, config_of(tiny_gpt2), "one", "never")
        await never.stop()
        assert never.ended.is_set()


@as_a_leader
async def test_replica_loading_under_previous_leader_continues_loading(
    server: RayServer, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    loading = tmp_path / IS_LOADING
    loading.touch()
    async with driving(server, StandIn) as cluster:
        actor = await an_actor(cluster, config, "two", "young")
        begun = asyncio.Event()
        starting = asyncio.create_task(actor.start(lambda loaded, total: begun.set()))
        await begun.wait()
        starting.cancel()
    async with driving(server, StandIn) as cluster:
        controller = Controller(Models(), cluster.make_actor, unmeasured, cluster.discover)
        await controller.discover()
        (hosted,) = controller.adopt(await cluster.orphans())
        assert not hosted.is_loaded
        loading.unlink()
        await hosted.up()
        assert hosted.actor.model == MODEL
        await controller.stop()


@as_a_leader
async def test_dead_node_and_its_replicas_are_forgotten(server: RayServer, tiny_gpt2: Path) -> None:
    third = await asyncio.to_thread(server.add, "three", {"ndif_cpu_memory": 64 * GIB})
    async with driving(server, StandIn) as cluster:
        config = config_of(tiny_gpt2)
        models = Models([config])
        controller = Controller(models, cluster.make_actor, too_large, cluster.discover)
        await controller.discover()
        (provided,) = await controller.deploy([ReplicaRequest(next(iter(models)), "0.8", 1)])
        hosted = controller.replica(Variant(config.key, "0.8"), provided.replica_ids[0])
        assert hosted is not None
        await hosted.up()
        node_id = await node_called(cluster, "three")
        running = asyncio.create_task(hosted.actor.run(a_request(subscription_id=None), nothing))
        left: asyncio.Queue[str] = asyncio.Queue()
        controller.on_leave(lambda key, why: left.put_nowait(why))
        await asyncio.to_thread(third.kill)
        with pytest.raises(ReplicaLostError, match="gone"):
            await running
        assert await left.get() == "its node is gone"
        assert hosted.actor.ended.is_set()
        assert node_id not in controller.cluster.nodes
        assert list(controller.cluster.replicas()) == []
        await controller.stop()


async def too_large(config: DeploymentConfig, generation: str) -> Measured:
    """Return a size that fits only one node."""
    return Measured(32 * GIB)


@as_a_leader
async def test_unusable_orphans_are_ended(server: RayServer, tiny_gpt2: Path) -> None:
    config = config_of(tiny_gpt2)
    async with driving(server, StandIn) as cluster:
        actor = await an_actor(cluster, config, "one", "dead")
        await actor.start(lambda loaded, total: None)
        await actor._handle.stop.remote()  # its process stays
    async with driving(server, StandIn) as cluster:
        assert await cluster.orphans() == []
        _, left = await asyncio.to_thread(psutil.wait_procs, server.workers("StandIn"), PATIENCE_S)
        assert left == []
