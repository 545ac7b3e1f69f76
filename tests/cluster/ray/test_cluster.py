"""The resources that a node declares to Ray, and replicas that end with their node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError, RaySystemError

from ndif.cluster.ray import actors as actors_module
from ndif.cluster.ray import cluster as cluster_module
from ndif.cluster.ray.actors import RayModelActor
from ndif.cluster.ray.cluster import HEAD, RayCluster, declaration, nodes_of, resources_of
from ndif.cluster.remote_actor import RemoteActor
from ndif.host.port import ReplicaEvictedError, ReplicaLostError
from ndif.placement.resources import Resources
from ndif.stores.broker.redis.job_channels import JobSender
from tests.cluster.ray.rays import a_request
from tests.on_loop import on_loop
from tests.waiting import eventually, time_passes_async

pytestmark = pytest.mark.engine

GIB = 1 << 30


def entry(name: str, resources: dict[str, float], *, alive: bool = True) -> dict[str, Any]:
    """Return a node as in `ray.nodes()`."""
    own = {"CPU": 8.0, "memory": 1e9, "object_store_memory": 1e8, "node:10.0.0.1": 1.0}
    return {
        "NodeID": f"id-of-{name}",
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "Alive": alive,
        "Resources": own | resources,
    }


@given(
    st.lists(st.integers(1, 1 << 40), max_size=16),
    st.integers(0, 1 << 44),
)
def test_declared_resources_round_trip(gpus: list[int], cpu: int) -> None:
    resources = Resources.of(gpus, cpu, 1.0)
    # Ray stores numbers as floats and drops zeros.
    kept = {name: float(size) for name, size in declaration(resources).items() if size}
    read = resources_of(kept)
    assert read == (resources if gpus or cpu else None)


def test_node_declares_only_its_share_of_cpu_memory() -> None:
    declared = declaration(Resources.of([80 * GIB], 100 * GIB, 0.5))
    assert declared == {"ndif_cpu_memory": 50 * GIB, "ndif_gpu_0": 80 * GIB}


def test_ray_call_after_leaving_cluster_starts_no_cluster() -> None:
    assert not ray.is_initialized()
    with pytest.raises(RaySystemError, match="has not been started"):
        ray.nodes()


def test_gpu_uuids_are_declared() -> None:
    offered = Resources.of([80 * GIB, 24 * GIB], 0, 1.0, ["GPU-7c3cadbd-17e5", None])
    declared = declaration(offered)
    assert declared["ndif_gpu_0_is_GPU-7c3cadbd-17e5"] == 1
    assert resources_of({name: float(size) for name, size in declared.items() if size}) == offered


def test_only_live_nodes_with_resources_are_listed() -> None:
    offered = declaration(Resources.of([GIB, 2 * GIB], 3 * GIB, 1.0))
    table = [
        entry("head", dict(HEAD)),
        entry("one", offered),
        entry("gone", offered, alive=False),
        entry("a head that serves", {**HEAD, "ndif_cpu_memory": 5.0}),
        entry("", {"ndif_gpu_0": 7.0}),
    ]
    first, serving, nameless = nodes_of(table)
    assert (first.id, first.name) == ("id-of-one", "one")
    assert (first.resources.gpu_bytes, first.resources.cpu_bytes) == ((GIB, 2 * GIB), 3 * GIB)
    assert serving.resources.cpu_bytes == 5
    assert (nameless.name, nameless.resources.gpu_bytes) == ("10.0.0.1", (7,))


def test_nodes_with_same_hostname_get_distinct_names() -> None:
    offered = declaration(Resources.of([GIB], GIB, 1.0))
    table = [
        {**entry("box", offered), "NodeID": node_id}
        for node_id in ("0123456789ab", "01234567ffff", "99")
    ]
    table.append(entry("other", offered))
    names = [node.name for node in nodes_of(table)]
    assert names == ["box (012345678)", "box (01234567f)", "box (99)", "other"]


@pytest.mark.parametrize("declared", [{}, {"CPU": 4.0}, {"head": 1.0}, {"ndif_gpu_1": 5.0}])
def test_foreign_node_offers_no_resources(declared: dict[str, float]) -> None:
    assert resources_of(declared) is None


class Unavailable:
    """The handle of an actor that Ray reports as unavailable forever and never as dead."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            self.asked.append(method)
            raise ActorUnavailableError("The actor is temporarily unavailable", b"\0" * 16)

        return SimpleNamespace(remote=remote)


@on_loop
async def test_replica_ends_with_dead_node_even_if_ray_reports_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [entry("head", {"ndif_cpu_memory": GIB}), entry("other", {"ndif_cpu_memory": GIB})]
    monkeypatch.setattr(cluster_module.ray, "nodes", lambda: nodes)
    cluster = RayCluster("10.0.0.1:6380", RemoteActor, cast(JobSender, None))
    handle = Unavailable()
    actor = cluster._keep(
        RayModelActor("r1", lambda: handle, cast(JobSender, None), {}, handle, "id-of-head")
    )
    running = asyncio.create_task(actor._run(a_request()))
    actor._run_by = "job", actor
    actor.cancel("Killed.")
    assert len(await cluster.discover()) == 2
    await eventually(lambda: {"run", "cancel", "until_ended"} <= {*handle.asked})
    assert not running.done()
    nodes[0]["Alive"] = False
    assert [node.name for node in await cluster.discover()] == ["other"]
    with pytest.raises(ReplicaLostError, match="its node is gone"):
        await running
    assert actor.ended.is_set()
    await asyncio.sleep(0)
    assert not actor._cancelling
    with pytest.raises(ReplicaLostError, match="its node is gone"):
        await actor._run(a_request())


@on_loop
async def test_stopped_replica_is_not_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actors_module, "_STOP_S", 0.1)
    monkeypatch.setattr(actors_module, "_AGAIN_S", 0.01)
    monkeypatch.setattr(actors_module.ray, "kill", lambda handle: None)
    handle = Unavailable()
    actor = RayModelActor("r1", lambda: handle, cast(JobSender, None), {}, handle)
    running = asyncio.create_task(actor._run(a_request()))
    await eventually(lambda: {"run", "until_ended"} <= {*handle.asked})
    await actor.stop()
    with pytest.raises(ReplicaEvictedError):
        await running
    await asyncio.sleep(0)
    asked = len(handle.asked)
    await time_passes_async(0.1)
    assert {"run", "stop", "until_ended"} <= {*handle.asked}
    assert len(handle.asked) == asked
