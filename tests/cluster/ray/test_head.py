"""A Ray head with replicas: it is killed while their jobs run, and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from ndif.cluster.ray import cluster as cluster_module
from ndif.cluster.ray.actors import _AGAIN_S, RayModelActor
from ndif.cluster.ray.cluster import declaration
from ndif.host.port import ReplicaLostError
from ndif.tasks import within
from tests.cluster.ray.rays import (
    OFFERED,
    a_request,
    an_actor,
    as_a_leader,
    config_of,
    driving,
    nothing,
    ray_cluster,
)
from tests.host.stand_in import StandIn
from tests.services.process import HOST
from tests.services.redis import RedisServer
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = [pytest.mark.engine, pytest.mark.slow]


async def run_both(actors: Sequence[RayModelActor]) -> bool:
    """Return True if each of these replicas has a job."""
    return all([(await actor.describe()).requests for actor in actors])


async def asks_no_more(actor: RayModelActor) -> bool:
    """Return True if the replica is not called for longer than the pause before a retry."""
    unreached = actor._unreached
    await time_passes_async(4 * _AGAIN_S)
    return actor._unreached == unreached


@as_a_leader
async def test_replica_on_dead_head_is_lost_and_not_called_again(
    redis: RedisServer, tmp_path: Path, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a head that restarts for ten seconds counts as lost, and the leader ends.
    monkeypatch.setattr(cluster_module, "_PATIENCE_S", PATIENCE_S)
    config = config_of(tiny_gpt2)
    memory = RedisServer(tmp_path)
    environment = {"NDIF_BROKER_URL": redis.url}
    kept = {"RAY_REDIS_ADDRESS": f"{HOST}:{memory.port}"}
    with (
        memory,
        ray_cluster(environment, "one", head=kept, resources=declaration(OFFERED)) as server,
    ):
        async with driving(server, StandIn) as cluster:
            actors = [await an_actor(cluster, config, node, node) for node in ("head", "one")]
            for actor in actors:
                await actor.start(lambda loaded, total: None)
            on_head, on_one = [
                asyncio.create_task(actor.run(a_request(subscription_id=None), nothing))
                for actor in actors
            ]
            await eventually(lambda: run_both(actors))
            await asyncio.to_thread(server.head.kill)
            actors[0].cancel("Killed.")
            await asyncio.to_thread(server.head.start)
            with pytest.raises(ReplicaLostError):
                await within(on_head, PATIENCE_S)
            assert actors[0].ended.is_set()
            await eventually(lambda: asks_no_more(actors[0]))
            assert not on_one.done()
            actors[1].cancel("Enough.")
            assert (await on_one).description == "Enough."
