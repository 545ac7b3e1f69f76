"""Replicas on a real Ray cluster: a head and two nodes, with a real Redis and a real object store."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nnsight import TransformersModel

from ndif.schema.response import InlineResult
from ndif.schema.status import Status
from ndif.stores.objects import FileStore
from tests.cluster.rays import a_client, a_replica, driving, nothing, ray_cluster
from tests.on_loop import on_loop
from tests.runtime.replica import expected, reading
from tests.services.ray import RayServer
from tests.services.redis import RedisServer
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer


@pytest.fixture(scope="module")
def client(tiny_gpt2: Path) -> TransformersModel:
    return TransformersModel(str(tiny_gpt2), task="text-generation")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FileStore:
    """Of the driver, which only keeps large requests there."""
    return FileStore(tmp_path_factory.mktemp("objects"), 3600)


@pytest.fixture(scope="module")
def environment(
    redis: RedisServer, s3: SwiftServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What every node is started with."""
    return {
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


@on_loop
async def test_a_trace_runs_on_a_node(
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
        assert actor.model["class"] == "GPT2LMHeadModel"
        for trusted in (True, False):
            request = await user.send(reading(client), trusted=trusted)
            response = await actor(request, nothing)
            assert (response.status, response.delivered) == (Status.COMPLETED, True)
            assert response.data is None
            told = await user.until(request, Status.COMPLETED)
            assert isinstance(told.data, InlineResult)
            saves = torch.load(io.BytesIO(told.data.content), weights_only=False)
            assert torch.equal(saves["logits"], expected(tiny_gpt2))
            assert [r.status for r in user.told[request.id]] == [Status.RUNNING, Status.COMPLETED]
