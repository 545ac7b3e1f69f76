"""The simulated replica keeps the promises of `ModelActor`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ndif.host.port import ModelActor, ReplicaEvictedError
from ndif.placement.replica import PlacedReplica
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey, Variant
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.states import DeploymentLevel
from ndif.schema.status import Status
from ndif.simulation import virtual_time
from ndif.simulation.actor import SimulatedActor
from ndif.simulation.journal import Journal, NodeUsage
from ndif.simulation.trace import TraceRequest
from ndif.simulation.world import read
from tests.waiting import virtual_time_passes as elapse

WORLD = read(
    """
nodes: [{gpus: 4x10GB, cpu_memory: 100GB}]
speeds: {start_up: 10s, load_bytes_per_s: 1GB, warm_bytes_per_s: 2GB, cache_bytes_per_s: 4GB}
""",
    "c.yaml",
)
VARIANT = Variant(ModelKey("a.B", "org/name"), "0.8")
NODE = WORLD.nodes[0].id
SIZE = 8 * 10**9
REQUEST = Request(VARIANT.model, "0.8", Wire.ENVELOPE, b"", False, "", id="0")

Scene = Callable[[ModelActor, NodeUsage], Coroutine[Any, Any, None]]


def play(scene: Scene, run_s: float = 5.0, *, on_cpu: bool = False) -> NodeUsage:
    """Play a scene with a replica on two GPUs; return its usage until the end."""

    async def main() -> NodeUsage:
        journal = Journal([TraceRequest(0.0, VARIANT.model, "ada", run_s)])
        gpus = {} if on_cpu else {0: 10**10, 1: 10**10}
        place = PlacedReplica(
            str(VARIANT), "id", NODE, DeploymentLevel.HOT, SIZE, 0.0, gpus, on_cpu=on_cpu
        )
        config = DeploymentConfig("org/name", "org/name", execution_timeout_s=100.0)
        replica: ModelActor = SimulatedActor(config, place, WORLD, journal)
        usage = journal.by_model[VARIANT]
        await scene(replica, usage)
        journal.close(now())
        assert journal.by_node[NODE] is not usage
        return usage

    return virtual_time.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


async def ignore(response: Response) -> bool:
    assert response.status in (Status.DISPATCHED, Status.RUNNING)
    return True


def no_progress(loaded: int, total: int) -> None:
    assert 0 <= loaded <= total


def test_each_step_takes_time_and_holds_resources() -> None:
    times = []

    async def scene(replica: ModelActor, usage: NodeUsage) -> None:
        reports: list[tuple[int, int]] = []
        await replica.start(lambda loaded, total: reports.append((loaded, total)))
        assert reports == [(0, SIZE), (SIZE, SIZE)]
        times.append(now())
        assert (await replica.run(REQUEST, ignore)).status is Status.COMPLETED
        times.append(now())
        await replica.to_cache()
        times.append(now())
        await elapse(3)
        await replica.from_cache({2: 10**10})
        times.append(now())
        await replica.stop()
        await replica.stop()
        assert replica.ended.is_set()
        await elapse(100)

    usage = play(scene)
    assert times == [18.0, 23.0, 25.0, 32.0]
    assert (usage.cold_loads, usage.warm_returns) == (1, 1)
    assert (usage.evicted_warm, usage.evicted_cold, usage.dropped) == (1, 1, 0)
    assert usage.loading_s == 22.0
    assert sum(usage.gpus_held.hours) == 2 * 25 + 1 * 4
    assert sum(usage.gpus_busy.hours) == 2 * 5
    assert sum(usage.cpu_bytes.hours) == 3 * SIZE


def test_ended_warm_replica_counts_as_dropped() -> None:
    async def scene(replica: ModelActor, usage: NodeUsage) -> None:
        await replica.start(no_progress)
        await replica.to_cache()
        await replica.stop()

    usage = play(scene)
    assert (usage.evicted_warm, usage.evicted_cold, usage.dropped) == (1, 0, 1)


@pytest.mark.parametrize("leave", ["to_cache", "stop"])
def test_running_request_of_leaving_replica_is_evicted(leave: str) -> None:
    async def scene(replica: ModelActor, usage: NodeUsage) -> None:
        await replica.start(no_progress)
        running = asyncio.ensure_future(replica.run(REQUEST, ignore))
        await elapse(2)
        await getattr(replica, leave)()
        with pytest.raises(ReplicaEvictedError):
            await running

    usage = play(scene)
    assert usage.interrupted == 1
    assert sum(usage.gpus_busy.hours) == 2 * 2


def test_cancelled_request_ends_as_error_with_reason() -> None:
    async def scene(replica: ModelActor, usage: NodeUsage) -> None:
        await replica.start(no_progress)
        replica.cancel("nobody runs")
        running = asyncio.ensure_future(replica.run(REQUEST, ignore))
        await elapse(2)
        replica.cancel("The client left.")
        replica.cancel("again")
        response = await running
        assert (response.status, response.description) == (Status.ERROR, "The client left.")
        assert (await replica.run(REQUEST, ignore)).status is Status.COMPLETED

    assert sum(play(scene).gpus_busy.hours) == 2 * (2 + 5)


def test_request_over_execution_timeout_is_ended() -> None:
    async def scene(replica: ModelActor, usage: NodeUsage) -> None:
        await replica.start(no_progress)
        response = await replica.run(REQUEST, ignore)
        assert response.status is Status.ERROR
        assert "1m 40s" in response.description
        assert now() == 118.0

    play(scene, run_s=101.0)


def test_replica_ended_while_loading_releases_resources() -> None:
    async def scene(replica: ModelActor, usage: NodeUsage) -> None:
        loading = asyncio.ensure_future(replica.start(no_progress))
        await elapse(6)
        loading.cancel()
        await asyncio.wait([loading])
        await replica.stop()
        await elapse(50)

    usage = play(scene)
    assert (usage.cold_loads, usage.evicted_cold, usage.dropped) == (0, 0, 0)
    assert (usage.loading_s, sum(usage.gpus_held.hours)) == (6.0, 12.0)


def test_cpu_replica_keeps_memory_and_runs_slower() -> None:
    async def scene(replica: ModelActor, usage: NodeUsage) -> None:
        await replica.start(no_progress)
        await replica.run(REQUEST, ignore)
        assert now() == 18 + 5 * WORLD.speeds.cpu_slowdown
        await replica.to_cache()
        await replica.from_cache({})
        assert now() == 118.0
        await replica.stop()

    usage = play(scene, on_cpu=True)
    assert (sum(usage.gpus_held.hours), sum(usage.gpus_busy.hours)) == (0.0, 0.0)
    assert sum(usage.cpu_bytes.hours) == 118 * SIZE
    assert (usage.evicted_warm, usage.warm_returns) == (1, 1)
