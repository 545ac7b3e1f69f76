"""GPUs that fail repeatedly are withdrawn from placement for a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ndif.cli.status import _rendered
from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import ProvisionResult, ReplicaRequest
from ndif.cluster.models import Models
from ndif.control.state import node_state
from ndif.host.device_errors import (
    COOLDOWN_S,
    MAX_ERRORS,
    WINDOW_S,
    DeviceErrors,
    DeviceFailure,
    Withdrawal,
)
from ndif.host.evaluation import Measured
from ndif.host.port import FailedDeviceError, Progress, Respond, ServedModel
from ndif.placement.cluster import Cluster
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.schema.answer import to_plain
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.server_state import ProblemKind
from tests.on_loop import on_loop
from tests.placement.worlds import GiB, a_node, deploy, want, with_hot

ECC = "CUDA error: uncorrectable ECC error encountered"


def after(*times: float, of: str = "GPU-1") -> DeviceErrors:
    errors = DeviceErrors()
    for time in times:
        errors = errors.noted([of], ECC, time)
    return errors


# Counting of errors


def test_three_errors_within_ten_minutes_withdraw_gpu() -> None:
    assert after(0, 300).withdrawn(301) == {}
    assert after(0, 300, WINDOW_S).withdrawn(WINDOW_S) == {
        "GPU-1": Withdrawal(WINDOW_S + COOLDOWN_S, ECC)
    }
    assert after(0, 300, WINDOW_S + 1).withdrawn(WINDOW_S + 1) == {}


def test_withdrawn_gpu_returns_after_rest_with_cleared_count() -> None:
    errors = after(0, 1, 2)
    assert errors.withdrawn(2 + COOLDOWN_S - 1)
    assert errors.withdrawn(2 + COOLDOWN_S) == {}
    again = errors.noted(["GPU-1"], ECC, 2 + COOLDOWN_S)
    assert again.withdrawn(2 + COOLDOWN_S) == {}


def test_errors_are_counted_per_gpu() -> None:
    errors = after(0, 1).noted(["GPU-1", "GPU-2"], "CUDA error: unknown error", 2)
    assert errors.withdrawn(3) == {"GPU-1": Withdrawal(2 + COOLDOWN_S, "CUDA error: unknown error")}


@given(
    st.lists(st.floats(0, 2 * (WINDOW_S + COOLDOWN_S)), max_size=12), st.floats(0, 10 * COOLDOWN_S)
)
def test_gpu_is_withdrawn_exactly_during_rest_after_third_error(
    times: list[float], later: float
) -> None:
    times.sort()
    now = max(times, default=0.0) + later
    thirds = [
        last
        for first, last in zip(times, times[MAX_ERRORS - 1 :], strict=False)
        if last - first <= WINDOW_S
    ]
    assert bool(after(*times).withdrawn(now)) == any(now < last + COOLDOWN_S for last in thirds)


# Withdrawn GPUs in the cluster


def named(gpus: str, *uuids: str) -> Node:
    node = a_node(gpus)
    return replace(node, resources=replace(node.resources, gpu_uuids=uuids))


def test_withdrawn_gpu_keeps_replicas_and_gets_no_new_ones() -> None:
    node = with_hot(named("2x24GiB", "GPU-1", "GPU-2"), "old", 4, [0], share=True)
    cluster = Cluster.of(node).with_withdrawn({"GPU-1", "GPU-elsewhere"})
    assert cluster.nodes["n1"].resources.withdrawn == {0}
    assert len(cluster.hot("old")) == 1
    (placed,) = deploy(cluster, want("new", 4)).placed
    assert [*placed.replica.gpu_mem_bytes_by_id] == [1]
    (refused,) = deploy(cluster, want("large", 25)).refused
    assert refused.capacity_bytes == 24 * GiB
    back = cluster.with_withdrawn(frozenset())
    assert not back.nodes["n1"].resources.withdrawn
    assert back.with_withdrawn(frozenset()) is back


def test_withdrawn_gpu_stays_withdrawn_after_rediscovery() -> None:
    node = with_hot(named("2x24GiB", "GPU-1", "GPU-2"), "old", 4, [0], share=True)
    cluster = Cluster.of(node).with_withdrawn({"GPU-1"})
    update = cluster.with_nodes([named("2x24GiB", "GPU-1", "GPU-2")])
    assert update.removed == update.lost == ()
    assert update.cluster.nodes["n1"].resources.withdrawn == {0}
    exchanged = cluster.with_nodes([named("2x24GiB", "GPU-1", "GPU-3")])
    assert exchanged.removed == ("n1",)


def test_gpus_without_uuid_are_identified_by_node_and_index() -> None:
    first, two = a_node("2x24GiB", node_id="n1"), a_node("2x24GiB", node_id="n2")
    cluster = Cluster.of(first, two).with_withdrawn({"GPU 1 of n2"})
    withdrawn = {node.id: node.resources.withdrawn for node in cluster.nodes.values()}
    assert withdrawn == {"n1": frozenset(), "n2": {1}}


# Replicas that fail


class OnBadGpus:
    """A replica that fails with a GPU error at its start or on request."""

    def __init__(self, place: PlacedReplica, bad: frozenset[int]) -> None:
        self.shared_passes = None
        self.ended = asyncio.Event()
        self.device_failure: DeviceFailure | None = None
        self.model: ServedModel | None = None
        self._bad = bad & place.gpu_mem_bytes_by_id.keys()

    async def start(self, progress: Progress) -> None:
        if self._bad:
            self.ended.set()
            raise FailedDeviceError("it did not load", DeviceFailure(ECC))

    def dies(self, failure: DeviceFailure | None) -> None:
        self.device_failure = failure
        self.ended.set()

    async def to_cache(self) -> None: ...

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None: ...

    async def stop(self) -> None:
        self.ended.set()

    async def __call__(self, request: Request, respond: Respond) -> Response:
        raise NotImplementedError

    def cancel(self, reason: str) -> None: ...


class World:
    """A controller with two GPUs, one model and a clock."""

    def __init__(self, size: int = 4, bad: frozenset[int] = frozenset()) -> None:
        self.now = 1000.0
        self.bad = bad
        self.actors: list[OnBadGpus] = []
        self.places: list[list[int]] = []
        self.models = Models([DeploymentConfig("a/b", "a/b", dedicated=True, device="cuda")])
        self.node = Node("n1", "here", Resources.of([24 * GiB] * 2, 0, 1.0, ["GPU-1", "GPU-2"]))

        async def measure(config: DeploymentConfig, generation: str) -> Measured:
            return Measured(size * GiB)

        async def discover() -> list[Node]:
            return [self.node]

        self.controller = Controller(
            self.models, self._make, measure, discover, now=lambda: self.now, rng=random.Random(0)
        )

    def _make(self, config: DeploymentConfig, generation: str, place: PlacedReplica) -> OnBadGpus:
        actor = OnBadGpus(place, self.bad)
        self.actors.append(actor)
        self.places.append(sorted(place.gpu_mem_bytes_by_id))
        return actor

    async def deploy(self) -> ProvisionResult:
        (model,) = self.models
        (provided,) = await self.controller.deploy([ReplicaRequest(model, "0.8", 1)])
        for _ in range(20):  # decisions are carried out in other tasks
            await asyncio.sleep(0)
        return provided


@on_loop
async def test_replicas_avoid_gpu_after_three_failures() -> None:
    world = World(bad=frozenset([0]))
    await world.controller.discover()
    for _ in range(4):
        await world.deploy()
        world.now += 60
    assert world.places == [[0], [0], [0], [1]]
    (problem,) = world.controller.device_problems()
    assert (problem.kind, problem.subject) == (ProblemKind.GPU_WITHDRAWN, "GPU 0 of here")
    assert problem.text.startswith("GPU 0 of here (GPU-1) takes no model until ")
    assert repr(ECC) in problem.text
    await world.controller.stop()


@on_loop
async def test_withdrawn_gpu_returns_to_placement_after_rest() -> None:
    world = World(bad=frozenset([0]))
    await world.controller.discover()
    for _ in range(3):
        await world.deploy()
    assert world.controller.cluster.nodes["n1"].resources.withdrawn == {0}
    world.now += COOLDOWN_S
    await world.controller.discover()  # as the reconciler does
    assert world.controller.cluster.nodes["n1"].resources.withdrawn == frozenset()
    assert world.controller.device_problems() == []
    await world.controller.stop()


@on_loop
async def test_loss_of_serving_replica_counts_as_gpu_error() -> None:
    world = World()
    await world.controller.discover()
    for failure in (DeviceFailure(ECC), None, DeviceFailure(ECC), DeviceFailure(ECC)):
        await world.deploy()
        world.actors[-1].dies(failure)
        for _ in range(20):
            await asyncio.sleep(0)
    await world.deploy()
    assert world.places == [[0]] * 4 + [[1]]
    await world.controller.stop()


@on_loop
async def test_only_gpu_named_in_failure_is_blamed() -> None:
    world = World(size=40)
    await world.controller.discover()
    for gpu in (1, 1, 1):
        await world.deploy()
        world.actors[-1].dies(DeviceFailure(ECC, gpu))
        for _ in range(20):
            await asyncio.sleep(0)
    assert world.controller.cluster.nodes["n1"].resources.withdrawn == {1}
    provided = await world.deploy()
    assert provided.replica_ids == ()
    await world.controller.stop()


# Status for the operator


def test_status_names_gpus_and_marks_withdrawn_ones() -> None:
    node = named("2x24GiB", "GPU-b42dd28e-ffdd-8720", "GPU-7c3cadbd-17e5-0913")
    cluster = Cluster.of(node).with_withdrawn({"GPU-7c3cadbd-17e5-0913"})
    schedule = {"source": None, "next_change": None, "read_every_s": 30.0}
    status = {
        "nodes": [to_plain(node_state(cluster.nodes["n1"]))],
        "models": [],
        "problems": ["GPU 1 of here takes no model"],
        "schedule": {**schedule, "problems": [], "windows": []},
    }
    console = Console(width=120)
    with console.capture() as captured:
        console.print(_rendered(status))
    printed = captured.get()
    assert "GPU 0 (GPU-b42dd28e) " in printed
    assert "GPU 1 (GPU-7c3cadbd), withdrawn" in printed
    assert [gpu["withdrawn"] for gpu in status["nodes"][0]["gpus"]] == [False, True]
