"""Adoption of replicas that a previous controller left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ndif.cluster.adoption import adopt
from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import OrphanReplica, ReplicaRequest
from ndif.cluster.models import Models, NotServedError
from ndif.cluster.replica import EvictedError
from ndif.host.device_errors import DeviceFailure
from ndif.host.evaluation import Measured
from ndif.host.port import ActorError, Progress, Respond, ServedModel
from ndif.placement.cluster import Cluster
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import Variant
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.states import DeploymentLevel, ReplicaState
from ndif.tasks import within
from tests.host.stand_in import MODEL
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S

HOT, WARM = DeploymentLevel.HOT, DeploymentLevel.WARM
MINE = DeploymentConfig("a/mine", "a/mine", dedicated=True)
THEIRS = DeploymentConfig("a/theirs", "a/theirs")


class Quiet:
    """A replica whose moves do nothing."""

    def __init__(self, *, starts: bool = True) -> None:
        self.shared_passes = None
        self.ended = asyncio.Event()
        self.device_failure: DeviceFailure | None = None
        self.model: ServedModel | None = replace(MODEL, repo_id="A/Theirs")
        self.began = asyncio.Event()
        self._starts = starts

    async def start(self, progress: Progress) -> None:
        self.began.set()
        if not self._starts:
            raise ActorError("it is broken")

    async def to_cache(self) -> None: ...

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None: ...

    async def stop(self) -> None:
        self.ended.set()

    async def __call__(self, request: Request, respond: Respond) -> Response:
        raise NotImplementedError

    def cancel(self, reason: str) -> None: ...


def node(name: str = "n", gpus: tuple[int, ...] = (100, 100), cpu: int = 200) -> Node:
    return Node(name, name, Resources.of(gpus, cpu, 1.0))


def orphan(
    config: DeploymentConfig = THEIRS,
    replica_id: str = "r",
    level: DeploymentLevel = HOT,
    *,
    is_loaded: bool = True,
    actor: Quiet | None = None,
    **more: Any,
) -> OrphanReplica:
    gpus = {"gpu_mem_bytes_by_id": {0: 100} if level is HOT else {}}
    deployment = PlacedReplica(
        **{
            "model_key": str(Variant(config.key, "0.8")),
            "replica_id": replica_id,
            "node_id": "n",
            "level": level,
            "size_bytes": 60,
            "deployed": 7.0,
            **gpus,
            **more,
        }
    )
    return OrphanReplica(deployment, config, actor or Quiet(), is_loaded)


def test_adopted_replica_keeps_its_placement() -> None:
    models = Models([MINE])
    described = [
        orphan(THEIRS, level=WARM),
        orphan(MINE, gpu_mem_bytes_by_id={1: 60}),
        orphan(THEIRS, "s", on_cpu=True, gpu_mem_bytes_by_id={}),
    ]
    adoption = adopt(Cluster.of(node()), models, described)
    assert not adoption.dropped
    books = {(d.model_key, d.replica_id): d for d in adoption.cluster.replicas()}
    mine = books[str(Variant(MINE.key, "0.8")), "r"]
    assert (mine.dedicated, mine.deployed, mine.gpu_memory_fraction) == (True, 7.0, 0.6)
    assert {d.level for d in books.values() if d is not mine} == {HOT, WARM}
    resources = adoption.cluster.nodes["n"].resources
    assert (resources.free_gpu_bytes, resources.free_cpu_bytes) == ((100, 40), 80)


def test_adopted_replica_on_whole_gpu_has_no_memory_fraction() -> None:
    adoption = adopt(Cluster.of(node()), Models(), [orphan()])
    assert next(adoption.cluster.replicas()).gpu_memory_fraction is None


def test_unknown_adopted_model_counts_as_on_demand() -> None:
    models = Models()
    config = replace(THEIRS, dedicated=True)
    adopt(Cluster.of(node()), models, [orphan(config)])
    (model,) = models
    assert (model.key, model.on_demand, model.dedicated) == (THEIRS.key, True, False)
    assert models.admit(THEIRS.key, "0.8", hotswapping=True) is model


def test_orphans_without_place_are_dropped() -> None:
    models = Models([MINE, replace(THEIRS, dtype="float16")])
    without = orphan(DeploymentConfig("a/b", "a/b"), "without", node_id="gone")
    other_gpus = orphan(DeploymentConfig("a/c", "a/c"), "gpus", gpu_mem_bytes_by_id={5: 1})
    too_large = orphan(DeploymentConfig("a/d", "a/d"), "large", WARM, size_bytes=1000)
    changed = orphan(THEIRS, "changed")
    another_name = orphan(replace(MINE, task="fill-mask"), "named")
    kept = orphan(MINE, "kept")
    twice = orphan(MINE, "kept", gpu_mem_bytes_by_id={1: 1})
    described = [without, other_gpus, too_large, changed, another_name, kept, twice]
    adoption = adopt(Cluster.of(node()), models, described)
    assert [hosted.placed.replica_id for hosted, *_ in adoption.kept] == ["kept"]
    assert len(adoption.dropped) == len(described) - 1
    assert [d.replica_id for d in adoption.cluster.replicas()] == ["kept"]
    # Dropped replicas add no model.
    assert len(list(models)) == 2


def test_serving_orphans_are_adopted_first() -> None:
    cached = orphan(MINE, "warm", WARM, size_bytes=150)
    serving = orphan(THEIRS, "hot", on_cpu=True, gpu_mem_bytes_by_id={}, size_bytes=100)
    adoption = adopt(Cluster.of(node()), Models([MINE]), [cached, serving])
    assert adoption.dropped == (cached,)


def test_adopted_gated_model_stays_gated() -> None:
    async def play() -> None:
        gated = Quiet()
        gated.model = replace(MODEL, repo_id="A/Theirs", gated=True)
        async with controlling(Fleet()) as controller:
            controller.adopt([orphan(THEIRS, actor=gated)])
            models = controller.models
            with pytest.raises(NotServedError, match="gated or private"):
                models.admit(THEIRS.key, "0.8", hotswapping=True)
            assert models.admit(THEIRS.key, "0.8", hotswapping=True, gated=True).gated

    asyncio.run(play())


# Adoption by a controller


class Fleet:
    """Nodes that join and leave."""

    def __init__(self) -> None:
        self.nodes = [node("n"), node("m")]
        self.made: list[Quiet] = []
        self.broken_on: set[str] = set()

    async def discover(self) -> list[Node]:
        return self.nodes

    def make_actor(self, config: DeploymentConfig, generation: str, place: PlacedReplica) -> Quiet:
        breaks = place.node_id in self.broken_on
        if breaks:
            self.nodes = [
                candidate for candidate in self.nodes if candidate.id not in self.broken_on
            ]
        self.made.append(Quiet(starts=not breaks))
        return self.made[-1]


@contextlib.asynccontextmanager
async def controlling(fleet: Fleet, *configs: DeploymentConfig) -> AsyncIterator[Controller]:
    async def measure(config: DeploymentConfig, generation: str) -> Measured:
        return Measured(60)

    controller = Controller(Models(configs), fleet.make_actor, measure, fleet.discover)
    await controller.discover()
    yield controller
    await controller.stop()


@on_loop
async def test_adopted_replicas_serve_at_once_and_are_watched() -> None:
    async with controlling(Fleet()) as controller:
        actor, other = Quiet(), Quiet()
        described = [
            orphan(actor=actor),
            orphan(MINE, level=WARM),
            orphan(THEIRS, "gone", node_id="gone", actor=other),
        ]
        hot, warm = controller.adopt(described)
        assert (hot.state, warm.state) == (ReplicaState.RUNNING, ReplicaState.NOT_STARTED)
        assert warm.is_loaded
        assert hot.model.config.repo_id == "A/Theirs"
        assert hot.used.is_set()
        await hot.up()
        await within(other.ended.wait(), PATIENCE_S)
        left: asyncio.Queue[str] = asyncio.Queue()
        controller.on_leave(lambda key, why: left.put_nowait(why))
        actor.ended.set()
        assert await left.get() == "its process ended"
        assert controller.replicas() == [warm]
        assert [d.level for d in controller.cluster.replicas()] == [WARM]


@on_loop
async def test_adopted_loading_replica_continues_loading() -> None:
    async with controlling(Fleet()) as controller:
        actor, broken = Quiet(), Quiet(starts=False)
        loading, failing = controller.adopt(
            [
                orphan(actor=actor, is_loaded=False),
                orphan(MINE, actor=broken, is_loaded=False, gpu_mem_bytes_by_id={1: 60}),
            ]
        )
        assert loading.state is ReplicaState.DEPLOYING
        await loading.up()
        assert loading.serving
        await within(broken.ended.wait(), PATIENCE_S)
        assert failing not in controller.replicas()


@on_loop
async def test_leaving_controller_keeps_replicas_alive() -> None:
    async with controlling(Fleet()) as controller:
        actor = Quiet()
        controller.adopt([orphan(actor=actor)])
        await controller.leave()
        assert not actor.ended.is_set()
        assert controller.replicas() == []


@on_loop
async def test_lost_node_is_not_recorded_as_problem_of_model() -> None:
    fleet = Fleet()
    fleet.broken_on = {"n"}
    fleet.nodes = [node("n"), node("m", gpus=(), cpu=10)]  # the model fits only on the first node
    async with controlling(fleet, THEIRS) as controller:
        (model,) = controller.models
        (provided,) = await controller.deploy([ReplicaRequest(model, "0.8", 1)])
        hosted = controller.replica(Variant(model.key, "0.8"), provided.replica_ids[0])
        assert hosted is not None
        with pytest.raises(EvictedError, match="its node is gone"):
            await hosted.up()
        assert not model.problems
        assert list(controller.cluster.nodes) == ["m"]
        assert controller.replicas() == []
