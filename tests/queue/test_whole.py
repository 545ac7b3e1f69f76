"""Queues, placement and replicas together in virtual time, on nodes that check their memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest

from ndif.cluster import status
from ndif.cluster.controller import Controller
from ndif.cluster.models import Models, NotServedError
from ndif.cluster.replica import Replica
from ndif.cluster.status import client_status
from ndif.control.control_plane import ControlPlane
from ndif.control.fetch_ahead import FetchAhead
from ndif.control.operations import (
    Deploy,
    Evict,
    Export,
    GetQueue,
    GetStatus,
    Kill,
    KillKey,
    Restart,
    Scale,
)
from ndif.control.overview import Overview
from ndif.control.reconciler import Reconciler
from ndif.host.device_errors import DeviceFailure
from ndif.host.evaluation import Measured
from ndif.host.execution import announce
from ndif.host.port import (
    ActorError,
    Progress,
    ReplicaEvictedError,
    ReplicaLostError,
    Respond,
    ServedModel,
)
from ndif.placement.demand import PlacementRules
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.probe.history import Histories
from ndif.queue.autoscaler import Bounds, Scaling
from ndif.queue.callbacks.delivery import CallbackDelivery
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import QueuePolicy
from ndif.schedule.expansion import Expansion, expand
from ndif.schedule.source import ScheduleSource
from ndif.schema.answer import to_plain
from ndif.schema.deployment import DeploymentConfig, OperationError
from ndif.schema.deployment_settings import DeploymentChange
from ndif.schema.model_key import ModelKey, Variant
from ndif.schema.repositories import Repositories
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.states import ReplicaState
from ndif.schema.status import Status
from ndif.simulation.virtual_time import run
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore
from ndif.stores.responder import Responder
from ndif.stores.usage import MemoryUsage
from tests import frames
from tests.schema.configs import from_value
from tests.waiting import eventually
from tests.waiting import virtual_time_passes as elapse

LOAD_S, MOVE_S = 20.0, 2.0
LONG_AGO = datetime(2026, 3, 2, 8, tzinfo=timezone.utc)
GPU, CPU = 100, 150


class Memory:
    """A node's memory; it asserts that usage never exceeds the capacity."""

    def __init__(self, capacity: Mapping[Any, int]) -> None:
        self._capacity = capacity
        self.used: dict[Any, int] = dict.fromkeys(capacity, 0)

    def take(self, amounts: Mapping[Any, int]) -> None:
        for place, size in amounts.items():
            self.used[place] += size
            assert self.used[place] <= self._capacity[place], f"too much on {place}"

    def give_back(self, amounts: Mapping[Any, int]) -> None:
        for place, size in amounts.items():
            self.used[place] -= size
            assert self.used[place] >= 0


class OperationCalls(ControlPlane):
    """Operations as calls that return the part of their answer that tests check."""

    async def deploy(
        self, configs: Sequence[DeploymentConfig], generation: str | None, *, wait: bool, sync: bool
    ) -> Any:
        operation = Deploy(
            deployments=tuple(map(DeploymentChange.complete, configs)),
            generation=generation,
            wait=wait,
            sync=sync,
        )
        return to_plain(await operation.perform(self))["models"]

    async def evict(self, model: str, replica: str | None, *, cold: bool) -> Any:
        operation = Evict(model=model, replica=replica, cold=cold)
        return to_plain(await operation.perform(self))["evicted"]

    async def scale(self, model: str, replicas: int, generation: str | None) -> Any:
        operation = Scale(model=model, replicas=replicas, generation=generation)
        return to_plain(await operation.perform(self))["models"]

    async def restart(self, model: str) -> Any:
        return to_plain(await Restart(model=model).perform(self))["restarted"]

    async def kill(self, request_id: str) -> bool:
        try:
            return (await Kill(request_id=request_id).perform(self)).killed
        except OperationError:
            return False

    async def status(self) -> dict[str, Any]:
        document: dict[str, Any] = to_plain(await GetStatus().perform(self))
        return document

    async def queue(self) -> dict[str, Any]:
        document: dict[str, Any] = to_plain(await GetQueue().perform(self))
        return document

    async def export(self) -> Any:
        return (await Export().perform(self)).deployments


class Actor:
    """A replica that accounts for its memory, and takes virtual time."""

    def __init__(self, place: PlacedReplica, memory: Memory, broken: frozenset[str]) -> None:
        self.shared_passes = None
        self.ended = asyncio.Event()
        self.device_failure: DeviceFailure | None = None
        self.model: ServedModel | None = None
        self.loads = 0
        self._place = place
        self._memory = memory
        self._broken = broken
        self._held: dict[Any, int] = {}
        self._running: asyncio.Future[Exception | str | None] | None = None

    def _hold(self, amounts: Mapping[Any, int]) -> None:
        self._memory.give_back(self._held)
        self._held = dict(amounts)
        self._memory.take(self._held)

    async def start(self, progress: Progress) -> None:
        on_gpus = self._place.gpu_mem_bytes_by_id
        self._hold({"cpu": self._place.size_bytes} if self._place.on_cpu else on_gpus)
        self.loads += 1
        await elapse(LOAD_S)
        if self._place.model_key.split('"')[3] in self._broken:
            raise ActorError("it is broken")

    async def to_cache(self) -> None:
        self._end_run(ReplicaEvictedError("evicted"))
        await elapse(MOVE_S)
        self._hold({"cpu": self._place.size_bytes})

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        await elapse(MOVE_S)
        self._hold(gpu_mem_bytes_by_id or {"cpu": self._place.size_bytes})

    async def stop(self) -> None:
        self._end_run(ReplicaEvictedError("ended"))
        await asyncio.sleep(0)
        self._hold({})
        self.ended.set()

    def die(self) -> None:
        """End like a killed process."""
        self._hold({})
        self.ended.set()
        self._end_run(ReplicaLostError("it was killed"))

    async def run(self, request: Request, respond: Respond) -> Response:
        assert self._running is None, "two at once"
        assert not self.ended.is_set()
        running = self._running = asyncio.get_running_loop().create_future()
        timer = None
        try:
            await announce(request, respond)
            timer = running.get_loop().call_later(float(request.payload), self._end_run, None)
            outcome = await running
        finally:
            if timer is not None:
                timer.cancel()
            self._running = None
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            return Response(request.id, Status.ERROR, outcome)
        return Response(request.id, Status.COMPLETED, "Done.")

    def cancel(self, reason: str) -> None:
        self._end_run(reason)

    def _end_run(self, outcome: Exception | str | None) -> None:
        if self._running is not None and not self._running.done():
            self._running.set_result(outcome)


async def expand_here(content: bytes, zone: str, since: datetime, until: datetime) -> Expansion:
    """Expand a calendar without a process, which takes no virtual time."""
    return expand(content, ZoneInfo(zone), since, until)


def listed(world: World) -> dict[str, Any]:
    """The models in the answer of `GET /status`."""
    document = to_plain(client_status(world.controller, world.reconciler.coming()))
    deployments: dict[str, Any] = document["deployments"]
    return deployments


class World:
    """A server without its gateway."""

    kind = Actor
    missing = ""
    """A generation whose models cannot be loaded."""
    look_s = 0.0
    """Seconds that node discovery takes."""

    def __init__(
        self,
        folder: Path,
        sizes: Mapping[str, int],
        *,
        configs: tuple[DeploymentConfig, ...] = (),
        gpus: int = 1,
        minimum_s: float = 0.0,
        calendar: Path | None = None,
        broken: frozenset[str] = frozenset(),
        bounds: Bounds | None = None,
        store: FileStore | None = None,
        repositories: Repositories | None = None,
    ) -> None:
        self.sizes = sizes
        self.gated = set[str]()
        """Models that are gated on the hub."""
        self.of_pull_requests = set[str]()
        """Revisions that are on no branch or tag."""
        self.hub: dict[str, str] = {}
        """Names of models at a hub, by their spelling in small letters."""
        self.memory = Memory({**dict.fromkeys(range(gpus), GPU), "cpu": CPU})
        self.actors: dict[tuple[str, str], Actor] = {}
        self.broker = MemoryBroker()
        self.ended: dict[str, Response] = {}
        self._ended = asyncio.Event()
        self.gpus = gpus
        self._broken = broken
        self.controller = Controller(
            Models(configs, repositories=repositories),
            self._make,
            self._size,
            self._discover,
            rules=PlacementRules(minimum_deployment_time_s=minimum_s, drain_s=30.0),
            now=lambda: self.now().timestamp(),
            rng=random.Random(0),
        )
        responder = Responder(self.broker, store or FileStore(folder, 3600))
        self.dispatcher = Dispatcher(
            self.controller, self.broker, responder, QueuePolicy(update_interval_s=1e6)
        )
        self.reconciler = Reconciler(
            self.controller,
            self.dispatcher,
            Scaling(self.dispatcher, bounds or Bounds(), lambda: self.now().timestamp()),
            ScheduleSource(str(calendar), expand=expand_here) if calendar else None,
            lambda: ["0.8", "0.7"],
            30.0,
            self.now,
        )
        self.usage = MemoryUsage()
        self.overview = Overview(
            self.controller,
            self.dispatcher,
            self.reconciler,
            self.usage,
            Histories(),
            minimum_s,
            lambda: self.now().timestamp(),
        )
        self.operations = OperationCalls(
            self.controller,
            self.dispatcher,
            self.reconciler,
            lambda: ["0.8", "0.7"],
            lambda: None,
            self.usage,
            responder,
            7 * 24 * 3600.0,
            cast(CallbackDelivery, None),  # nobody here is called back
            self.overview,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def now(self) -> datetime:
        return LONG_AGO + timedelta(seconds=asyncio.get_running_loop().time())

    def _make(self, config: DeploymentConfig, generation: str, place: PlacedReplica) -> Actor:
        actor = self.actors[place.key] = self.kind(place, self.memory, self._broken)
        return actor

    async def _size(self, config: DeploymentConfig, generation: str) -> Measured:
        await elapse(1)
        repo_id = self.hub.get(config.checkpoint.lower(), config.repo_id)
        if repo_id not in self.sizes:
            raise ActorError("there is no such repository")
        if generation == self.missing:
            raise ActorError("that is not installed")
        return Measured(
            self.sizes[repo_id] + (config.padding_bytes or 0),
            repo_id=repo_id,
            parameters=7,
            gated=repo_id in self.gated,
            on_branch=config.revision not in self.of_pull_requests,
        )

    async def _discover(self) -> list[Node]:
        await elapse(self.look_s)
        return [Node("here", "here", Resources.of([GPU] * self.gpus, CPU, 1.0))]

    async def __aenter__(self) -> World:
        await self.controller.discover()
        self.dispatcher.start()
        self._channel = await self.broker.subscribe()
        self._tasks = [asyncio.create_task(self._listen())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self.dispatcher.stop()
        await self.controller.stop()
        assert set(self.memory.used.values()) == {0}, self.memory.used

    def keep_up(self) -> None:
        self._tasks.append(asyncio.create_task(self.reconciler.run()))

    async def _listen(self) -> None:
        while True:
            response = frames.read(await self._channel.next())
            if response.status.terminal:
                assert response.id not in self.ended, "it ended twice"
                self.ended[response.id] = response
                self._ended.set()

    async def send(
        self, model: str, run_s: float = 1.0, user: str = "", *, polled: bool = False, **more: Any
    ) -> str:
        key = DeploymentConfig(model, model, more.pop("revision", None)).key
        variant = self.controller.models.find(key)
        request = Request(
            variant.key if variant else key,
            more.pop("generation", "0.8"),
            Wire.ENVELOPE,
            str(run_s).encode(),
            False,
            "",
            subscription_id=None if polled else more.pop("subscription_id", self._channel.id),
            user=user,
            hotswapping=more.pop("hotswapping", True),
            received=self.now().timestamp(),
            **more,
        )
        await self.broker.submit(request)
        return request.id

    async def until_ended(self, *ids: str) -> list[Response]:
        while not all(request_id in self.ended for request_id in ids):
            self._ended.clear()
            await self._ended.wait()
        return [self.ended[request_id] for request_id in ids]

    def of(self, model: str) -> list[Replica]:
        return [h for h in self.controller.replicas() if h.model.config.repo_id == model]

    def levels(self, model: str) -> list[str]:
        return sorted(hosted.placed.level.value for hosted in self.of(model))


def read_files_at_once() -> None:
    """Make the loop read files without threads: in simulated time, one would take hours."""
    loop = asyncio.get_running_loop()

    def at_once(executor: None, function: Callable[[], Any]) -> asyncio.Future[Any]:
        future = loop.create_future()
        future.set_result(function())
        return future

    loop.run_in_executor = at_once  # type: ignore[method-assign, assignment]


def test_cached_model_returns_without_reloading(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 70}) as world:
            for model in ("a/a", "a/b", "a/a", "a/b", "a/a"):
                (response,) = await world.until_ended(await world.send(model))
                assert response.status is Status.COMPLETED, response
            assert world.levels("a/a") == ["HOT"]
            assert world.levels("a/b") == ["WARM"]
            assert [actor.loads for actor in world.actors.values()] == [1, 1]

    run(main())


def test_jobs_of_models_that_evict_each_other_all_complete(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 70}) as world:
            ids = [await world.send(model, 40.0) for _ in range(4) for model in ("a/a", "a/b")]
            responses = await world.until_ended(*ids)
            assert {response.status for response in responses} == {Status.COMPLETED}
            assert [actor.loads for actor in world.actors.values()] == [1, 1]

    run(main())


def test_refusal_reports_reason_and_remaining_protection(tmp_path: Path) -> None:
    async def main() -> None:
        sizes = {"a/a": 90, "a/b": 95, "a/c": 96, "a/d": 500}
        async with World(tmp_path, sizes, minimum_s=100) as world:
            await world.until_ended(await world.send("a/a"))
            await world.until_ended(await world.send("a/b"))  # on the CPU
            young, large, unknown = await world.until_ended(
                await world.send("a/c"), await world.send("a/d"), await world.send("no/such")
            )
            assert young.status is large.status is unknown.status is Status.ERROR
            assert "'a/a' is protected for another" in young.description
            assert "the largest node, here, has" in large.description
            assert "there is no such repository" in unknown.description
            # The minimum deployment time counts from the begin of serving.
            served = next(iter(world.of("a/a"))).placed.deployed
            await elapse(served + 100 - world.now().timestamp() + 1)
            (response,) = await world.until_ended(await world.send("a/c"))
            assert response.status is Status.COMPLETED, response

    run(main())


def test_evicted_job_is_rerun_and_eviction_does_not_count_as_attempt(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", replicas=2)
        async with World(tmp_path, {"a/a": 40}, configs=(config,), gpus=2) as world:
            ids = [await world.send("a/a", 100.0) for _ in range(2)]
            await elapse(LOAD_S + 10)
            first, second = world.of("a/a")
            for host in (first, second):
                await world.operations.evict("a/a", host.placed.replica_id, cold=True)
                await elapse(60)  # longer than it may go on
            responses = await world.until_ended(*ids)
            assert {response.status for response in responses} == {Status.COMPLETED}

    run(main())


def test_eviction_fails_waiting_jobs_and_lets_running_job_finish(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            running, waiting = [await world.send("a/a", 10.0) for _ in range(2)]
            await elapse(LOAD_S + 5)
            evicted = await world.operations.evict("A/A", None, cold=False)
            assert len(evicted) == 1
            (response,) = await world.until_ended(waiting)
            assert "taken 'a/a' off the server" in response.description
            (completed,) = await world.until_ended(running)
            assert completed.status is Status.COMPLETED
            await elapse(5)
            assert world.levels("a/a") == ["WARM"]
            with pytest.raises(OperationError, match="no model 'a/zzz'"):
                await world.operations.evict("a/zzz", None, cold=False)

    run(main())


class Stubborn(Actor):
    """An actor whose broken process ends slowly."""

    def die(self) -> None:
        self._end_run(ReplicaLostError("it does not answer"))

    async def stop(self) -> None:
        await elapse(10)
        await super().stop()


def test_memory_of_lost_replica_is_reused_only_after_its_process_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "kind", Stubborn)

    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 70}) as world:
            ids = [await world.send("a/a", 100.0)]
            await elapse(LOAD_S + 5)
            next(iter(world.actors.values())).die()
            await asyncio.sleep(0)
            (answer,) = await world.operations.deploy(
                [DeploymentConfig("a/b", "a/b", dedicated=True, device="cuda")],
                None,
                wait=True,
                sync=False,
            )
            assert answer["problem"] is None, answer
            (response,) = await world.until_ended(*ids)  # on the CPU, then
            assert response.status is Status.COMPLETED, response

    run(main())


def test_memory_of_replaced_node_is_reused_after_its_processes_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "kind", Stubborn)

    async def main() -> None:
        async with World(tmp_path, {"a/a": 60}, gpus=2) as world:
            for gpus in (1, 2):  # another machine each time
                world.gpus = gpus
                await world.controller.discover()
                (response,) = await world.until_ended(await world.send("a/a"))
                assert response.status is Status.COMPLETED, response
            assert len(world.actors) == 2

    run(main())


@pytest.mark.parametrize("look_s", [0.0, 5.0])
def test_replicas_change_consistently_during_node_discovery(tmp_path: Path, look_s: float) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "b/b": 10}, gpus=2) as world:
            await world.send("a/a", 100.0)
            await elapse(LOAD_S + 5)
            world.look_s = look_s
            looking = asyncio.create_task(world.controller.discover())
            await elapse(1)
            (actor,) = world.actors.values()
            actor.die()
            other = await world.send("b/b")
            await looking
            await elapse(2 * LOAD_S + 2 * look_s)
            # The job of the first model is rerun on another replica; the second model is placed.
            places = {deployment.key for deployment in world.controller.cluster.replicas()}
            assert places == {hosted.placed.key for hosted in world.controller.replicas()}
            assert len(places) == 2
            (response,) = await world.until_ended(other)
            assert response.status is Status.COMPLETED, response

    run(main())


def test_stopping_server_waits_for_ending_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "kind", Stubborn)

    async def main() -> None:
        async with World(tmp_path, {"a/a": 60}) as world:
            await world.send("a/a", 100.0)
            await elapse(LOAD_S + 5)
            (actor,) = world.actors.values()
            actor.die()
            await elapse(1)
            assert world.of("a/a") == []
        assert actor.ended.is_set()

    run(main())


def test_loading_model_is_evicted_immediately(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            waiting = await world.send("a/a")
            await elapse(LOAD_S / 2)
            await world.operations.evict("a/a", None, cold=False)
            await elapse(1)
            assert world.of("a/a") == []
            assert world.ended[waiting].status is Status.ERROR

    run(main())


def test_model_evicted_during_measurement_is_not_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            waiting = await world.send("a/a")
            await elapse(0.5)
            (evicted,) = await world.operations.evict("a/a", None, cold=False)
            assert evicted["replica_id"] is None
            assert "a/a" in evicted["model_key"]
            (evicted_response,) = await world.until_ended(waiting)
            assert "taken 'a/a' off the server" in evicted_response.description
            await elapse(60)
            assert world.actors == {}
            assert (await world.operations.status())["problems"] == []
            # The eviction is no ban: later requests are served.
            (response,) = await world.until_ended(await world.send("a/a"))
            assert response.status is Status.COMPLETED

    run(main())


def test_model_scaled_to_zero_during_measurement_is_not_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            config = DeploymentConfig("a/a", "a/a")
            coming = asyncio.create_task(
                world.operations.deploy([config], None, wait=True, sync=False)
            )
            await elapse(0.5)
            await world.operations.scale("a/a", 0, None)
            (answer,) = await coming
            assert answer["replicas"] == []
            await elapse(60)
            assert world.actors == {}

    run(main())


def test_model_redeployed_during_measurement_gets_its_new_size(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            first = DeploymentConfig("a/a", "a/a")
            coming = asyncio.create_task(
                world.operations.deploy([first], None, wait=True, sync=False)
            )
            await elapse(0.5)
            larger = replace(first, padding_bytes=30)
            await world.operations.deploy([larger], None, wait=True, sync=False)
            await coming
            (hosted,) = world.of("a/a")
            assert hosted.placed.size_bytes == 70

    run(main())


def test_deploy_reports_problem_if_fewer_replicas_fit(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60}) as world:
            four = DeploymentConfig("a/a", "a/a", replicas=4)
            (answer,) = await world.operations.deploy([four], None, wait=True, sync=False)
            assert len(answer["replicas"]) == 3
            assert "a/a" in answer["problem"]

    run(main())


def test_request_sent_after_eviction_is_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            first = await world.send("a/a")
            await elapse(0.5)
            await world.operations.evict("a/a", None, cold=False)
            second = await world.send("a/a")
            failed, served = await world.until_ended(first, second)
            assert failed.status is Status.ERROR
            assert served.status is Status.COMPLETED, served
            assert len(world.actors) == 1

    run(main())


def test_evicted_model_that_waited_for_room_evicts_no_other(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 70}) as world:
            first = await world.send("a/a", 200.0)
            await elapse(LOAD_S + 5)
            second = await world.send("a/b")
            await elapse(5)
            assert len(await world.operations.evict("a/b", None, cold=False)) == 1
            served, failed = await world.until_ended(first, second)
            assert served.status is Status.COMPLETED
            assert failed.status is Status.ERROR
            await elapse(60)
            assert world.levels("a/a") == ["HOT"]
            assert world.of("a/b") == []

    run(main())


def test_deploy_reports_concurrent_eviction(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            configs = [DeploymentConfig("a/a", "a/a", dedicated=True)]
            deploying = asyncio.create_task(
                world.operations.deploy(configs, None, wait=True, sync=False)
            )
            await elapse(0.5)
            assert len(await world.operations.evict("a/a", None, cold=False)) == 1
            (answer,) = await deploying
            assert answer["replicas"] == []
            assert "evicted it" in answer["problem"]
            assert world.actors == {}

    run(main())


def test_restart_replaces_replica_and_loses_no_job(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            ids = [await world.send("a/a", 10.0) for _ in range(3)]
            await elapse(LOAD_S + 5)
            before = {hosted.placed.replica_id for hosted in world.of("a/a")}
            await world.operations.restart("a/a")
            responses = await world.until_ended(*ids)
            assert {response.status for response in responses} == {Status.COMPLETED}
            after = {hosted.placed.replica_id for hosted in world.of("a/a")}
            assert len(after) == 1
            assert not before & after

    run(main())


def test_sync_evicts_models_that_are_not_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 20, "a/b": 20, "a/c": 20}) as world:
            configs = [DeploymentConfig(name, name) for name in ("a/a", "a/b")]
            answers = await world.operations.deploy(configs, None, wait=True, sync=False)
            assert [answer["problem"] for answer in answers] == [None, None]
            configs = [DeploymentConfig(name, name) for name in ("a/b", "a/c")]
            await world.operations.deploy(configs, None, wait=True, sync=True)
            await elapse(5)
            assert [world.levels(name) for name in ("a/a", "a/b", "a/c")] == [
                ["WARM"],
                ["HOT"],
                ["HOT"],
            ]

    run(main())


def test_lost_dedicated_model_is_reloaded_without_request(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True)
        async with World(tmp_path, {"a/a": 40}, configs=(config,)) as world:
            world.keep_up()
            await elapse(60)
            assert [hosted.state for hosted in world.of("a/a")] == [ReplicaState.RUNNING]
            next(iter(world.actors.values())).die()
            await elapse(1)
            assert world.of("a/a") == []
            await elapse(120)
            assert [hosted.state for hosted in world.of("a/a")] == [ReplicaState.RUNNING]

    run(main())


def test_broken_dedicated_model_is_retried_with_backoff(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True)
        broken = frozenset({"a/a"})
        async with World(tmp_path, {"a/a": 40}, configs=(config,), broken=broken) as world:
            world.keep_up()
            await elapse(3600)
            assert 3 <= len(world.actors) <= 12
            assert "could not be loaded" in (await world.operations.status())["problems"][0]

    run(main())


def test_problem_of_one_generation_is_reported_only_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            world.missing = "0.7"
            (older,) = await world.until_ended(await world.send("a/a", generation="0.7"))
            (newer,) = await world.until_ended(await world.send("a/a"))
            assert older.status is Status.ERROR
            assert newer.status is Status.COMPLETED
            status = await world.operations.status()
            problems = {row["generation"]: row["problem"] for row in status["models"]}
            assert problems == {"0.8": None, "0.7": older.description}
            assert status["problems"] == [older.description]
            (entry,) = listed(world).values()
            assert entry["runtimes"] == {"0.7": "UNHEALTHY", "0.8": "RUNNING"}
            assert entry["application_state"] == "RUNNING"

            world.missing = ""
            (older,) = await world.until_ended(await world.send("a/a", generation="0.7"))
            assert older.status is Status.COMPLETED
            assert (await world.operations.status())["problems"] == []

    run(main())


def test_calendar_dedicates_model_during_its_window(tmp_path: Path) -> None:
    calendar = tmp_path / "calendar.ics"
    calendar.write_text(
        "BEGIN:VCALENDAR\nVERSION:2.0\nPRODID:x\nBEGIN:VEVENT\nUID:1\nDTSTAMP:20260301T000000Z\n"
        "DTSTART:20260302T090000Z\nDTEND:20260302T100000Z\nRRULE:FREQ=DAILY;COUNT=2\nSUMMARY:a/a\n"
        "END:VEVENT\nEND:VCALENDAR\n"
    )

    async def main() -> None:
        read_files_at_once()
        sizes = {"a/a": 60, "a/b": 70}
        async with World(tmp_path, sizes, minimum_s=7200, calendar=calendar) as world:
            world.keep_up()
            (response,) = await world.until_ended(await world.send("a/b"))
            assert response.status is Status.COMPLETED
            assert world.levels("a/a") == []
            for left in (1, 0):
                # An hour later, the booked model evicts young replicas without any request.
                hour = (9 - world.now().hour) * 3600 % 86400
                await elapse(hour - world.now().minute * 60 + 60)
                assert world.levels("a/a") == ["HOT"]
                (held,) = world.of("a/a")
                assert held.placed.dedicated
                assert not held.placed.on_cpu
                assert (await world.operations.status())["schedule"]["windows"][0]["model"] == "a/a"
                for refused in (
                    world.operations.evict("a/a", None, cold=False),
                    world.operations.evict("a/a", held.placed.replica_id, cold=False),
                    world.operations.scale("a/a", 0, None),
                ):
                    with pytest.raises(OperationError, match=r"until 2026-03-0\d 10:00 UTC") as no:
                        await refused
                    assert no.value.status == 409
                await elapse(3600)
                (held,) = world.of("a/a")
                assert not held.placed.dedicated
                # The status lists the next window, too.
                coming = (await world.operations.status())["schedule"]["windows"]
                assert len(coming) == left
                assert all(window["start"] > world.now().isoformat() for window in coming)
                noted = [
                    (event.kind, event.subject, event.by)
                    for event in reversed(world.reconciler.events.latest())
                ]
                assert noted[-2:] == [
                    ("booking begun", "a/a", "calendar"),
                    ("booking over", "a/a", "calendar"),
                ]

    run(main())


def test_booked_model_is_downloaded_early_and_evicts_only_at_its_start(
    tmp_path: Path,
) -> None:
    calendar = tmp_path / "calendar.ics"
    calendar.write_text(
        "BEGIN:VCALENDAR\nVERSION:2.0\nPRODID:x\n"
        + "".join(
            f"BEGIN:VEVENT\nUID:{name}\nDTSTAMP:20260301T000000Z\nDTSTART:20260303T{at}00Z\n"
            f"DTEND:20260303T{until}00Z\nSUMMARY:{name}\nEND:VEVENT\n"
            for name, at, until in (
                ("a/a", "0900", "1000"),
                ("a/slow", "0905", "1000"),
                ("a/unknown", "0910", "1000"),
                ("a/large", "0915", "1000"),
                ("a/next", "1000", "1100"),
                ("a/later", "1200", "1300"),
            )
        )
        + "END:VCALENDAR\n"
    )
    asked = []
    cancelled = []

    async def main() -> None:
        read_files_at_once()
        sizes = {"a/a": 60, "a/b": 70, "a/slow": 5, "a/large": 600, "a/next": 65, "a/later": 5}
        async with World(tmp_path, sizes, minimum_s=7200, calendar=calendar) as world:

            async def fetch(config: DeploymentConfig, generation: str, node_id: str) -> None:
                asked.append((config.repo_id, generation, node_id, f"{world.now():%H:%M}"))
                if config.repo_id == "a/slow":
                    try:
                        await elapse(24 * 3600)
                    finally:
                        cancelled.append(f"{world.now():%H:%M}")
                elif len(asked) == 1:
                    raise ActorError("the hub is away")

            reconciler = world.reconciler
            reconciler.fetch_ahead = FetchAhead(
                world.controller, fetch, timedelta(hours=1), reconciler.events, world.now
            )
            # Until it is 07:00 of the day of the calendar.
            at = datetime(2026, 3, 3, 7, tzinfo=timezone.utc)
            await elapse((at - world.now()).total_seconds())
            world.keep_up()
            (response,) = await world.until_ended(await world.send("a/b"))
            assert response.status is Status.COMPLETED
            await elapse(115 * 60)
            # Current replicas stay; a model that is unknown or does not fit is not downloaded.
            assert world.levels("a/b") == ["HOT"]
            assert world.levels("a/a") == []
            assert asked == [
                ("a/a", "0.8", "here", "08:00"),
                ("a/slow", "0.8", "here", "08:05"),
                ("a/a", "0.8", "here", "08:10"),  # ten minutes after it failed
            ]
            fetched = [event for event in reconciler.events.latest() if event.kind == "fetched"]
            assert [(event.subject, event.text) for event in fetched] == [
                ("a/a", "Its files are on here for its booking at 2026-03-03 09:00 UTC.")
            ]
            assert cancelled == []
            kept = dict.fromkeys(
                ("a/a", "a/slow", "a/unknown", "a/large", "a/next", "a/later"), "booked"
            )
            assert reconciler.kept_repositories() == {**kept, "a/b": "deployed"}
            await elapse(15 * 60)
            assert reconciler.kept_repositories()["a/a"] == "deployed"
            assert world.levels("a/a") == world.levels("a/slow") == ["HOT"]
            assert cancelled == ["09:05"]  # as it begins, and its replica downloads it
            # The next model will use the memory of the one before it.
            assert asked[3:] == [("a/next", "0.8", "here", "09:00")]
            await elapse(120 * 60)
            assert asked[4:] == [("a/later", "0.8", "here", "11:00")]

    run(main())


def test_status_lists_every_model_in_form_that_all_clients_read(tmp_path: Path) -> None:
    calendar = tmp_path / "calendar.ics"
    calendar.write_text(
        "BEGIN:VCALENDAR\nVERSION:2.0\nPRODID:x\nBEGIN:VEVENT\nUID:1\nDTSTAMP:20260301T000000Z\n"
        "DTSTART:20260303T090000Z\nDTEND:20260303T100000Z\nSUMMARY:a/scheduled\nEND:VEVENT\n"
        "END:VCALENDAR\n"
    )

    async def main() -> None:
        read_files_at_once()
        names = ("a/warm", "a/running", "a/asked", "a/evicted", "a/broken")
        sizes = dict.fromkeys((*names, "a/scheduled"), 20)
        dedicated = [
            DeploymentConfig("a/broken", "a/broken", dedicated=True),
            DeploymentConfig("a/running", "a/running", dedicated=True, replicas=2),
        ]
        evicted = [DeploymentConfig(name, name) for name in ("a/warm", "a/evicted")]
        async with World(
            tmp_path,
            sizes,
            configs=(*dedicated, *evicted),
            gpus=3,
            calendar=calendar,
            broken=frozenset(["a/broken"]),
        ) as world:

            def status_by_name() -> dict[str, dict[str, Any]]:
                documents = listed(world)
                assert json.loads(json.dumps(documents)) == documents
                for entry in documents.values():
                    # 0.6 and 0.7 read these fields without a default.
                    assert {"deployment_level", "model_key", "repo_id", "revision"} <= entry.keys()
                    assert "dedicated" in entry or "schedule" in entry
                return {entry["repo_id"]: entry for entry in documents.values()}

            def words(name: str) -> tuple[str, str, str]:
                entry = status_by_name()[name]
                return entry["deployment_level"], entry["application_state"], entry["state"]

            world.keep_up()
            await elapse(0.5)  # their sizes are being worked out
            assert words("a/running") == ("HOT", "DEPLOYING", "DEPLOYING")
            await elapse(5)  # they load
            assert words("a/running") == ("HOT", "DEPLOYING", "DEPLOYING")
            assert status_by_name()["a/running"]["replicas"] == {"0.8": 0}
            for config in evicted:
                await world.operations.deploy([config], None, wait=True, sync=False)
            await world.operations.evict("a/warm", None, cold=False)
            await world.operations.evict("a/evicted", None, cold=True)
            unknown = await world.send("no/such")
            await world.until_ended(unknown, await world.send("a/asked"))
            await elapse(3600)

            assert words("a/running") == ("HOT", "RUNNING", "RUNNING")
            assert words("a/asked") == ("HOT", "RUNNING", "RUNNING")
            assert words("a/warm") == ("WARM", "NOT DEPLOYED", "NOT DEPLOYED")
            assert words("a/evicted") == ("COLD", "NOT DEPLOYED", "NOT DEPLOYED")
            assert words("a/scheduled") == ("COLD", "NOT DEPLOYED", "NOT DEPLOYED")
            assert words("a/broken") == ("HOT", "DOWN", "UNHEALTHY")
            documents = status_by_name()
            # A request for an unknown model does not add it to the status.
            assert documents.keys() == {*names, "a/scheduled"}
            assert documents["a/running"]["dedicated"] is True
            assert documents["a/warm"]["dedicated"] is documents["a/asked"]["dedicated"] is False
            assert "dedicated" not in documents["a/scheduled"]
            assert documents["a/scheduled"]["schedule"] == [
                {"start": "2026-03-03T09:00:00+00:00", "end": "2026-03-03T10:00:00+00:00"}
            ]
            assert "schedule" not in documents["a/running"]
            assert documents["a/running"]["nodes"] == documents["a/warm"]["nodes"] == ["here"]
            assert documents["a/evicted"]["nodes"] == documents["a/scheduled"]["nodes"] == []
            assert documents["a/running"]["parameters"] == 7
            # Clients of 0.8 count entries.
            every = listed(world).values()
            entries = [entry["repo_id"] for entry in every]
            assert {name: entries.count(name) for name in names} == {
                **dict.fromkeys(names, 1),
                "a/running": 2,
            }

            now = datetime(2026, 3, 3, 9, 30, tzinfo=timezone.utc)
            await elapse((now - world.now()).total_seconds())
            assert words("a/scheduled") == ("HOT", "RUNNING", "RUNNING")
            assert "schedule" in status_by_name()["a/scheduled"]
            assert "dedicated" not in status_by_name()["a/scheduled"]

    run(main())


def test_replicas_are_added_under_load_and_removed_when_idle(tmp_path: Path) -> None:
    async def main() -> None:
        bounds = Bounds(most=3, target_wait_s=30, idle_s=300, cooldown_s=60)
        async with World(tmp_path, {"a/a": 40}, gpus=3, bounds=bounds) as world:
            world.keep_up()
            ids = [await world.send("a/a", 20.0, user=str(i % 4)) for i in range(60)]
            most = 0
            while not all(request_id in world.ended for request_id in ids):
                await elapse(5)
                most = max(most, world.levels("a/a").count("HOT"))
            assert most == 3
            await elapse(3600)
            assert world.levels("a/a").count("HOT") == 1

    run(main())


def test_busy_dedicated_model_does_not_evict_protected_replicas(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True)
        bounds = Bounds(most=3, target_wait_s=30, idle_s=300, cooldown_s=60)
        sizes = {"a/a": 60, "a/b": 60}
        async with World(
            tmp_path, sizes, configs=(config,), gpus=3, minimum_s=3600, bounds=bounds
        ) as world:
            world.keep_up()
            await world.until_ended(await world.send("a/b"))
            ids = [await world.send("a/a", 20.0, user=str(i % 4)) for i in range(60)]
            most = 0
            while not all(request_id in world.ended for request_id in ids):
                await elapse(5)
                assert world.levels("a/b") == ["HOT"]
                hot = [h.placed for h in world.of("a/a") if not h.placed.on_cpu]
                assert sum(place.dedicated for place in hot) == 1
                most = max(most, len(hot))
            assert most == 2

    run(main())


def test_additional_replica_becomes_dedicated_after_loss_of_dedicated_one(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True)
        bounds = Bounds(most=2, target_wait_s=5, idle_s=300, cooldown_s=10)
        async with World(tmp_path, {"a/a": 60}, configs=(config,), gpus=2, bounds=bounds) as world:
            world.keep_up()
            await elapse(60)
            ids = [await world.send("a/a", 100.0) for _ in range(3)]
            await elapse(60)
            assert sorted(h.placed.dedicated for h in world.of("a/a")) == [False, True]
            (first,) = (h for h in world.of("a/a") if h.placed.dedicated)
            world.actors[first.placed.key].die()
            await elapse(60)
            assert sum(h.placed.dedicated for h in world.of("a/a")) == 1
            await world.until_ended(*ids)

    run(main())


def test_restart_keeps_number_of_dedicated_replicas(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True)
        async with World(tmp_path, {"a/a": 60}, gpus=2) as world:
            await world.operations.deploy([config], None, wait=True, sync=False)
            (line,) = world.dispatcher.processors.values()
            ids = [await world.send("a/a", 100.0) for _ in range(3)]
            line.add_replicas(2)
            await elapse(60)
            await world.operations.restart("a/a")
            await world.until_ended(*ids)
            assert sorted(h.placed.dedicated for h in world.of("a/a")) == [False, True]

    run(main())


def test_request_of_another_generation_does_not_dedicate_replica(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True, replicas=2)
        sizes = {"a/a": 60, "a/b": 60}
        async with World(tmp_path, sizes, configs=(config,), gpus=3) as world:
            world.keep_up()
            await elapse(60)
            await world.until_ended(await world.send("a/a", generation="0.7"))
            assert len(world.of("a/a")) == 3
            (older,) = (h.placed for h in world.of("a/a") if not h.placed.dedicated)
            # The replica can be evicted, does not return by itself, and is forgotten.
            await world.until_ended(await world.send("a/b"))
            displaced = world.controller.cluster.find(older.key)
            assert displaced is not None
            assert displaced.level is not older.level
            await world.operations.evict("a/a", older.replica_id, cold=True)
            await elapse(1000)
            assert [h.placed.dedicated for h in world.of("a/a")] == [True, True]
            assert len(world.dispatcher.processors) == 2  # a/b has one, too
            configs = from_value(await world.operations.export(), "it")
            assert [(config.repo_id, config.replicas) for config in configs] == [
                ("a/a", 2),
                ("a/b", 1),
            ]

    run(main())


def test_evict_all_spares_scheduled_models(tmp_path: Path) -> None:
    async def main() -> None:
        configs = tuple(DeploymentConfig(name, name, dedicated=True) for name in ("a/a", "a/b"))
        async with World(
            tmp_path, dict.fromkeys(("a/a", "a/b"), 60), configs=configs, gpus=2
        ) as world:
            await world.operations.deploy(configs, None, wait=True, sync=False)
            running = await world.send("a/b", 1000.0)
            await elapse(10)
            booked = world.controller.models.find(configs[1].key)
            assert booked is not None
            booked.scheduled = configs[1]
            answer = await Evict(all=True).perform(world.operations)
            assert answer.scheduled == ("a/b",)
            assert [
                Variant.parse(replica.model_key).model.repo_id for replica in answer.evicted
            ] == ["a/a"]
            for wrong in (Evict(), Evict(model="a/a", all=True), Evict(all=True, replica="r")):
                with pytest.raises(OperationError, match="Name either one model"):
                    await wrong.perform(world.operations)
            assert await world.operations.kill(running[:6])
            (ended,) = await world.until_ended(running)
            assert "operator has ended" in ended.description

    run(main())


def test_jobs_of_undeployed_model_fail_with_list_of_deployed_models(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        configs = tuple(
            DeploymentConfig(name, name, dedicated=True) for name in ("a/a", "a/b", "a/c")
        )
        sizes = dict.fromkeys(("a/a", "a/b", "a/c"), 60)
        async with World(tmp_path, sizes, configs=configs, gpus=3) as world:
            await world.operations.deploy(configs, None, wait=True, sync=False)
            running = await world.send("a/a", 1000.0, hotswapping=False)
            waiting = await world.send("a/a", hotswapping=False)
            await elapse(10)
            model = world.controller.models.put(replace(configs[0], dedicated=False))
            model.on_demand = True  # as after a booking
            (lost,) = world.of("a/a")
            await world.operations.evict("a/a", lost.placed.replica_id, cold=True)
            for response in await world.until_ended(waiting, running):
                assert response.status is Status.ERROR
                assert response.description == (
                    "'a/a' is not deployed on this server. Deployed models: 'a/b', 'a/c'. Loading "
                    "a model on demand needs the right `hotswapping`, which you do not have: ask the "
                    "server's operator for it."
                )

    run(main())


def test_scale_applies_to_generation_that_operator_deployed(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True)
        async with World(tmp_path, {"a/a": 20}, gpus=2) as world:
            await world.operations.deploy([config], "0.7", wait=True, sync=False)
            await world.until_ended(await world.send("a/a"))
            (answer,) = await world.operations.scale("a/a", 2, None)
            assert answer["generation"] == "0.7"
            # Scaling down a generation that a user loaded does not change the deployment.
            await world.operations.scale("a/a", 0, "0.8")
            (exported,) = from_value(await world.operations.export(), "it")
            assert (exported.replicas, exported.dedicated) == (2, True)
            assert exported.generations == ("0.7",)

    run(main())


def test_model_is_deployed_and_exported_with_several_generations(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True, generations=("0.7", "0.8"))
        async with World(tmp_path, {"a/a": 20}, gpus=2) as world:
            answers = await world.operations.deploy([config], None, wait=True, sync=False)
            assert [answer["generation"] for answer in answers] == ["0.7", "0.8"]
            assert world.levels("a/a") == ["HOT", "HOT"]
            exported = from_value(await world.operations.export(), "it")
            assert exported == (config,)
            await world.operations.scale("a/a", 0, "0.8")
            (exported_config,) = from_value(await world.operations.export(), "it")
            assert exported_config.generations == ("0.7",)

    run(main())


def test_one_generation_of_model_is_evicted(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True, generations=("0.7", "0.8"))
        async with World(tmp_path, {"a/a": 20}, gpus=2) as world:
            world.keep_up()
            await world.operations.deploy([config], None, wait=True, sync=False)
            evict = Evict(model="a/a", generation="0.7", cold=True)
            (evicted,) = (await evict.perform(world.operations)).evicted
            assert evicted.model_key.endswith("@0.7")
            await elapse(90)  # nothing has it come back
            (left,) = world.of("a/a")
            assert (left.generation, left.serving) == ("0.8", True)
            with pytest.raises(OperationError, match=r"'a/a' has no replica for nnsight 0\.7"):
                await evict.perform(world.operations)
            for wrong in (Evict(all=True, generation="0.7"),):
                with pytest.raises(OperationError, match="only with one model"):
                    await wrong.perform(world.operations)
            await Evict(model="a/a", generation="0.8", cold=True).perform(world.operations)
            await elapse(90)
            assert world.of("a/a") == []

    run(main())


def test_dedicated_model_is_loaded_for_each_of_its_generations(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True, generations=("0.7", "0.8"))
        async with World(tmp_path, {"a/a": 20}, configs=(config,), gpus=2) as world:
            world.keep_up()
            await elapse(60)
            generations = {Variant.parse(h.placed.model_key).generation for h in world.of("a/a")}
            assert generations == {"0.7", "0.8"}

    run(main())


@pytest.mark.parametrize(("of_its_own", "most"), [(None, 3), (1, 1), (2, 2), (4, 4)])
def test_max_replicas_of_model_overrides_autoscaling_limit(
    tmp_path: Path, of_its_own: int | None, most: int
) -> None:
    async def main() -> None:
        bounds = Bounds(most=3, target_wait_s=30, idle_s=300, cooldown_s=60)
        config = DeploymentConfig("a/a", "a/a", max_replicas=of_its_own)
        async with World(tmp_path, {"a/a": 60}, configs=(config,), gpus=5, bounds=bounds) as world:
            world.keep_up()
            for i in range(200):
                await world.send("a/a", 30.0, user=str(i))
            largest = 0
            for _ in range(100):
                await elapse(10)
                largest = max(largest, len(world.of("a/a")))
            assert largest == most

    run(main())


def test_export_of_model_scaled_beyond_max_replicas_is_valid(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", max_replicas=2)
        async with World(tmp_path, {"a/a": 20}, gpus=3) as world:
            await world.operations.deploy([config], None, wait=True, sync=False)
            await world.operations.scale("a/a", 3, None)
            (exported,) = from_value(await world.operations.export(), "it")
            assert (exported.replicas, exported.max_replicas) == (3, 3)

    run(main())


def test_additional_replica_that_fails_to_load_is_retried_with_backoff(tmp_path: Path) -> None:
    async def main() -> None:
        bounds = Bounds(most=3, target_wait_s=30, idle_s=300, cooldown_s=60)
        async with World(tmp_path, {"a/a": 60}, gpus=3, bounds=bounds) as world:
            world.keep_up()
            await world.until_ended(await world.send("a/a"))
            world._broken = frozenset({"a/a"})
            for i in range(120):
                await world.send("a/a", 30.0, user=str(i))
            tried = []
            for second in range(3000):
                await elapse(1)
                tried += [second] * (len(world.actors) - 1 - len(tried))
            pauses = [after - before for before, after in itertools.pairwise(tried)]
            assert 3 <= len(tried) <= 7
            assert pauses[-1] >= 2 * pauses[0], tried
            assert world.levels("a/a") == ["HOT"]

    run(main())


def test_loading_replica_is_kept_if_second_one_does_not_fit(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", replicas=2, device="cuda")
        async with World(tmp_path, {"a/a": 60}, configs=(config,)) as world:
            world.keep_up()
            (response,) = await world.until_ended(await world.send("a/a", 10.0))
            assert response.status is Status.COMPLETED
            assert len(world.actors) == 1

    run(main())


class FullStore(FileStore):
    """A store on a full disk."""

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        raise OSError(28, "No space left on device")


def test_failing_store_does_not_affect_other_jobs(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}, store=FullStore(tmp_path, 3600)) as world:
            await world.send("a/a", polled=True)
            await world.send("no/such", polled=True)
            for model in ("a/a", "no/such"):
                (response,) = await world.until_ended(await world.send(model))
                assert response.status is (Status.COMPLETED if model == "a/a" else Status.ERROR)

    run(main())


class SlowStore(FileStore):
    """A slow store."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 3600)
        self.stored: list[dict[str, Any]] = []

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        await elapse(4)
        self.stored.append(json.loads(content))


def test_job_cannot_be_killed_while_its_result_is_stored(tmp_path: Path) -> None:
    async def main() -> None:
        store = SlowStore(tmp_path)
        async with World(tmp_path, {"a/a": 40}, store=store) as world:
            await world.until_ended(await world.send("a/a"))
            job = await world.send("a/a", 10.0, polled=True)
            await elapse(16)  # told that it is sent to a replica, run
            (line,) = (await world.operations.queue())["models"]
            assert line["running"][0]["request_id"] == job
            assert not await world.operations.kill(job)
            await elapse(10)
            assert [update["status"] for update in store.stored][-1] == "COMPLETED"

    run(main())


def test_revoked_key_ends_its_current_and_new_jobs(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40, "a/b": 40}) as world:
            await world.until_ended(await world.send("a/a", key="hers"))
            runs = await world.send("a/a", 1000.0, key="his")
            waits = [await world.send(model, 1.0, key="his") for model in ("a/a", "a/b")]
            hers = await world.send("a/a", 1.0, key="hers")
            await elapse(2)
            revoke = KillKey(account="his", revoked=True)
            assert (await revoke.perform(world.operations)).killed == 3
            ended = await world.until_ended(runs, *waits)
            # A gateway may know the key for some seconds more.
            ended += await world.until_ended(await world.send("a/a", 1.0, key="his"))
            assert {response.status for response in ended} == {Status.ERROR}
            assert all("its API key was revoked" in response.description for response in ended)
            (response,) = await world.until_ended(hers)
            assert response.status is Status.COMPLETED
            assert (await revoke.perform(world.operations)).killed == 0
            # An operator ends the jobs of a valid key; its later jobs run.
            runs = await world.send("a/a", 1000.0, key="hers")
            await elapse(2)
            end = KillKey(account="hers")
            assert (await end.perform(world.operations)).killed == 1
            ended = await world.until_ended(runs, await world.send("a/a", 1.0, key="hers"))
            assert [response.status for response in ended] == [Status.ERROR, Status.COMPLETED]
            assert "operator has ended this job" in ended[0].description
            # The revoked key is forgotten after some time.
            await elapse(700)
            (last,) = await world.until_ended(await world.send("a/a", 1.0, key="his"))
            assert last.status is Status.COMPLETED

    run(main())


def test_job_killed_before_reaching_its_replica_does_not_run(tmp_path: Path) -> None:
    async def main() -> None:
        store = SlowStore(tmp_path)
        async with World(tmp_path, {"a/a": 40}, store=store) as world:
            await world.until_ended(await world.send("a/a"))
            job = await world.send("a/a", 1000.0, polled=True)
            await elapse(2)  # it is told that it is sent to a replica
            (line,) = (await world.operations.queue())["models"]
            assert line["running"][0]["request_id"] == job
            assert await world.operations.kill(job)
            await elapse(10)
            assert [update["status"] for update in store.stored] == ["DISPATCHED", "ERROR"]
            assert "operator has ended this job" in store.stored[-1]["description"]

    run(main())


def test_killed_job_is_not_rerun_after_loss_of_its_replica(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            await world.until_ended(await world.send("a/a"))
            job = await world.send("a/a", 1000.0)
            await elapse(5)
            (actor,) = world.actors.values()
            actor.cancel = lambda _: actor.die()  # type: ignore[method-assign]
            assert await world.operations.kill(job)
            (response,) = await world.until_ended(job)
            assert "operator has ended this job" in response.description

    run(main())


def test_model_waiting_for_replica_proceeds_after_its_eviction(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 70}) as world:
            first = await world.send("a/a", 200.0)
            await elapse(LOAD_S + 5)
            second = await world.send("a/b")
            await elapse(5)
            (host,) = world.of("a/a")
            await world.operations.evict("a/a", host.placed.replica_id, cold=True)
            responses = await asyncio.wait_for(world.until_ended(first, second), 3600)
            assert {response.status for response in responses} == {Status.COMPLETED}

    run(main())


@pytest.mark.parametrize("step", ["start", "to_cache", "from_cache"])
def test_error_while_moving_replica_leaves_no_memory_taken(tmp_path: Path, step: str) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 70}) as world:
            original = getattr(Actor, step)

            async def broken(self: Actor, *args: Any) -> None:
                if "a/a" in self._place.model_key:
                    raise OSError(24, "Too many open files")
                await original(self, *args)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Actor, step, broken)
                ids = [await world.send(model) for model in ("a/a", "a/b", "a/a")]
                await asyncio.wait_for(world.until_ended(*ids), 3600)
            for model in ("a/a", "a/b"):
                (response,) = await world.until_ended(await world.send(model))
                assert response.status is Status.COMPLETED, response

    run(main())


def test_changed_settings_reload_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            first = DeploymentConfig("a/a", "/one", replicas=2)
            (answer,) = await world.operations.deploy([first], None, wait=True, sync=False)
            (same,) = await world.operations.deploy([first], None, wait=True, sync=False)
            assert same["replicas"] == answer["replicas"]
            other = DeploymentConfig("a/a", "/two", dtype="float32")
            (answer,) = await world.operations.deploy([other], None, wait=True, sync=False)
            assert len(answer["evicted"]) == 2
            await elapse(60)
            (host,) = world.of("a/a")
            assert [host.placed.replica_id] == answer["replicas"]
            assert host.state is ReplicaState.RUNNING

    run(main())


def test_scaled_number_of_replicas_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", dedicated=True, replicas=2)
        async with World(tmp_path, {"a/a": 30}, configs=(config,)) as world:
            world.keep_up()
            await elapse(60)
            assert world.levels("a/a") == ["HOT", "HOT"]
            await world.operations.scale("a/a", 1, None)
            await elapse(300)
            assert world.levels("a/a").count("HOT") == 1
            await world.operations.scale("a/a", 3, None)
            await elapse(300)
            for actor in list(world.actors.values()):
                if not actor.ended.is_set():
                    actor.die()
            await elapse(300)
            assert world.levels("a/a") == ["HOT"] * 3
            assert (await world.operations.export())[0]["replicas"] == 3

    run(main())


def test_scale_to_zero_reports_model_and_evicted_replicas(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 30}) as world:
            await world.until_ended(await world.send("a/a"))
            (host,) = world.of("a/a")
            (answer,) = await world.operations.scale("a/a", 0, None)
            assert (answer["repo_id"], answer["generation"]) == ("a/a", "0.8")
            assert answer["replicas"] == []
            assert [e["replica_id"] for e in answer["evicted"]] == [host.placed.replica_id]
            assert answer["problem"] is None

    run(main())


@pytest.mark.parametrize("how", ["scale", "evict"])
def test_model_without_replicas_is_not_exported(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 30}) as world:
            config = DeploymentConfig("a/a", "a/a", dedicated=True)
            await world.operations.deploy([config], None, wait=True, sync=False)
            assert from_value(await world.operations.export(), "it") == (config,)
            (host,) = world.of("a/a")
            if how == "scale":
                await world.operations.scale("a/a", 0, None)
            else:
                await world.operations.evict("a/a", host.placed.replica_id, cold=True)
            assert await world.operations.export() == []
            # A user may load the model on demand; the export does not dedicate it.
            await world.until_ended(await world.send("a/a"))
            (exported,) = from_value(await world.operations.export(), "it")
            assert (exported.replicas, exported.dedicated) == (1, False)

    run(main())


def test_duplicate_configs_of_model_are_one_deployment(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 30}) as world:
            configs = [
                DeploymentConfig("a/a", "a/a"),
                DeploymentConfig("a/a", "a/a", task="text-generation"),
            ]
            (answer,) = await world.operations.deploy(configs, None, wait=True, sync=False)
            assert answer["problem"] is None
            assert world.levels("a/a") == ["HOT"]

    run(main())


REAL, ALIAS = "org/name", "name"
"""The name of a model at a hub, and other spellings that the hub accepts."""


def test_gated_model_requires_gated_right_unless_deployed(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            world.gated = {"a/a"}
            # The server knows that the model is gated only once it is measured.
            without = [await world.send("a/a") for _ in range(2)]
            for refused in await world.until_ended(*without):
                assert refused.status is Status.ERROR
                assert "'a/a' is gated or private on the hub" in refused.description
                assert "right `gated`" in refused.description
            assert not world.actors
            # In one queue with a user with the right.
            mixed = await world.send("a/a"), await world.send("a/a", gated=True)
            refused, served = await world.until_ended(*mixed)
            assert (refused.status, served.status) == (Status.ERROR, Status.COMPLETED)
            assert len(world.actors) == 1
            # The loaded model still requires the right.
            (refused,) = await world.until_ended(await world.send("a/a"))
            assert "gated" in refused.description
            # A gateway of another process knows as much.
            published = status.read(status.publish(world.controller.models), Repositories())
            key = DeploymentConfig("a/a", "a/a").key
            with pytest.raises(NotServedError, match="gated"):
                published.admit(key, "0.8", hotswapping=True)
            assert published.admit(key, "0.8", hotswapping=True, gated=True).gated
            # A model that the operator deployed is open to all users.
            config = DeploymentConfig("a/a", "a/a", dedicated=True)
            await world.operations.deploy([config], None, wait=True, sync=False)
            (served,) = await world.until_ended(await world.send("a/a", hotswapping=False))
            assert served.status is Status.COMPLETED

    run(main())


def test_pull_request_revision_is_refused_unless_allowed_or_deployed(tmp_path: Path) -> None:
    async def main() -> None:
        rules = Repositories(revisions=("refs/pr/7",))
        async with World(tmp_path, {"a/a": 40}, repositories=rules) as world:
            commit = "0123456789abcdef0123456789abcdef01234567"
            world.of_pull_requests = {commit, "refs/pr/7"}
            # The server knows where a commit is only once it is measured.
            ids = [await world.send("a/a", revision=name) for name in ("refs/pr/8", commit, commit)]
            for refused in await world.until_ended(*ids):
                assert refused.status is Status.ERROR
                assert "anybody can open a pull request" in refused.description
            assert not world.actors
            allowed = [await world.send("a/a", revision=name) for name in ("refs/pr/7", "v1", None)]
            for served in await world.until_ended(*allowed):
                assert served.status is Status.COMPLETED, served.description
            # An operator who deploys the commit has chosen it.
            config = DeploymentConfig("a/a", "a/a", commit, dedicated=True)
            await world.operations.deploy([config], None, wait=True, sync=False)
            (served,) = await world.until_ended(await world.send("a/a", revision=commit))
            assert served.status is Status.COMPLETED
            published = status.read(status.publish(world.controller.models), rules)
            assert not published.admit(config.key, "0.8", hotswapping=True).on_branch

    run(main())


def test_deployed_gated_model_is_open_to_all_under_its_alias(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {REAL: 40}) as world:
            world.gated, world.hub = {REAL}, {name.lower(): REAL for name in (REAL, ALIAS)}
            config = DeploymentConfig(REAL, REAL, dedicated=True)
            await world.operations.deploy([config], None, wait=True, sync=False)
            for _ in range(2):
                (served,) = await world.until_ended(await world.send(ALIAS))
                assert served.status is Status.COMPLETED, served.description
            assert len(world.actors) == 1

    run(main())


def test_denied_repository_is_rejected_under_its_alias(tmp_path: Path) -> None:
    async def main() -> None:
        rules = Repositories(denied=("Org/*",))
        async with World(tmp_path, {REAL: 40}, repositories=rules) as world:
            world.hub = {name.lower(): REAL for name in (REAL, ALIAS)}
            for name in (ALIAS, REAL):
                (refused,) = await world.until_ended(await world.send(name))
                assert refused.status is Status.ERROR
                assert "is not loaded on demand on this server" in refused.description
            assert not world.actors

    run(main())


@pytest.mark.parametrize(
    "order", [(REAL, ALIAS), (ALIAS, REAL), (ALIAS, "NAME"), ("Org/Name", REAL)]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_all_names_of_model_share_one_queue(
    tmp_path: Path, order: tuple[str, str], at_once: bool
) -> None:
    async def main() -> None:
        async with World(tmp_path, {REAL: 40}) as world:
            world.hub = {name.lower(): REAL for name in (REAL, ALIAS)}
            ids = []
            for name in (*order, *order):
                ids.append(await world.send(name))
                if not at_once:
                    await world.until_ended(*ids)
            responses = await world.until_ended(*ids)
            assert {response.status for response in responses} == {Status.COMPLETED}, responses
            assert len(world.actors) == 1
            (line,) = [m for m in (await world.operations.status())["models"] if m["replicas"]]
            assert line["repo_id"] == REAL
            # Clients of an older generation call its class otherwise.
            older = ModelKey("nnsight.modeling.language.LanguageModel", order[0])
            assert world.controller.models.find(older) is world.of(REAL)[0].model
            for name in (*order, REAL):
                (answer,) = await world.operations.scale(name, 1, None)
                assert answer["repo_id"] == REAL
            assert len(await world.operations.evict(order[1], None, cold=True)) == 1

    run(main())


def test_departed_and_killed_jobs_are_dropped_when_queues_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with World(tmp_path, {REAL: 40}) as world:
            world.hub = {name.lower(): REAL for name in (REAL, ALIAS)}
            await world.until_ended(await world.send(REAL))
            publish = world.broker.publish

            async def slowly(request: Request, response: Response) -> bool:
                await elapse(0.5)  # as Redis does
                return await publish(request, response)

            monkeypatch.setattr(world.broker, "publish", slowly)
            channel = await world.broker.subscribe()
            running = await world.send(REAL, 100.0)
            moved = await world.send(ALIAS)
            left = await world.send(ALIAS, subscription_id=channel.id)
            killed, last = await world.send(ALIAS), await world.send(ALIAS)
            real = world.dispatcher.processor(world.of(REAL)[0].model, "0.8")
            await eventually(lambda: moved in real.queue)
            await channel.close()
            assert await world.operations.kill(killed)
            await elapse(10)
            assert [entry.id for entry in real.queue] == [moved, last]
            await world.until_ended(running, moved, last)
            assert world.ended[killed].status is Status.ERROR
            assert left not in world.ended

    run(main())


def test_model_deployed_under_two_names_is_one_deployment(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {REAL: 40}) as world:
            world.hub = dict.fromkeys((REAL, ALIAS), REAL)
            replicas = set()
            for name in (REAL, ALIAS, ALIAS, REAL):
                (answer,) = await world.operations.deploy(
                    [DeploymentConfig(name, name, dedicated=True)], None, wait=True, sync=True
                )
                assert answer["problem"] is None
                assert answer["repo_id"] == REAL
                replicas |= set(answer["replicas"])
                assert [model.dedicated for model in world.controller.models] == [True]
            assert len(replicas) == 1
            assert len(world.actors) == 1

    run(main())


def test_name_refers_to_folder_it_was_deployed_from(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            folder = DeploymentConfig("a/a", "/models/a", task="text-generation")
            (first,) = await world.operations.deploy([folder], None, wait=True, sync=False)
            by_name = DeploymentConfig("a/a", "a/a")
            (answer,) = await world.operations.deploy([by_name], None, wait=True, sync=True)
            assert (answer["replicas"], answer["evicted"]) == (first["replicas"], [])
            (host,) = world.of("a/a")
            assert host.state is ReplicaState.RUNNING
            assert host.model.config == folder
            # Another folder is another checkpoint.
            moved = replace(folder, checkpoint="/models/b")
            (answer,) = await world.operations.deploy([moved], None, wait=True, sync=False)
            assert [row["replica_id"] for row in answer["evicted"]] == first["replicas"]

    run(main())


def test_deploy_does_not_list_replica_that_failed_to_load(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a")
        async with World(tmp_path, {"a/a": 40}, broken=frozenset({"a/a"})) as world:
            (answer,) = await world.operations.deploy([config], None, wait=True, sync=False)
            assert answer["replicas"] == []
            assert "it is broken" in answer["problem"]

    run(main())


@pytest.mark.parametrize("cold", [False, True])
def test_unmeasurable_model_is_forgotten_on_eviction(tmp_path: Path, cold: bool) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a")
        async with World(tmp_path, {"a/a": 40}, configs=(config,)) as world:
            world.keep_up()
            world.missing = "0.8"
            await world.operations.deploy([config], None, wait=True, sync=False)
            assert len((await world.operations.status())["problems"]) == 1
            (evicted,) = await world.operations.evict("a/a", None, cold=cold)
            assert evicted["replica_id"] is None
            assert (await world.operations.status())["problems"] == []
            await elapse(60)
            assert (await world.operations.status())["models"] == []
            with pytest.raises(OperationError, match="a/a"):
                await world.operations.evict("a/a", None, cold=cold)
            # It was no ban.
            world.missing = ""
            (answer,) = await world.operations.deploy([config], None, wait=True, sync=False)
            assert answer["problem"] is None

    run(main())


def test_model_that_failed_to_load_keeps_settings_on_eviction(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a", padding_bytes=3)
        async with World(tmp_path, {"a/a": 40}, broken=frozenset({"a/a"})) as world:
            world.keep_up()
            await world.operations.deploy([config], None, wait=True, sync=False)
            assert len((await world.operations.status())["problems"]) == 1
            (evicted,) = await world.operations.evict("a/a", None, cold=True)
            assert evicted["replica_id"] is None
            await elapse(60)
            status = await world.operations.status()
            assert status["problems"] == []
            assert [row["repo_id"] for row in status["models"]] == ["a/a"]
            (model,) = world.controller.models
            assert model.config.padding_bytes == 3

    run(main())


def test_scale_to_zero_clears_problem_of_model_that_failed_to_load(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        config = DeploymentConfig("a/a", "a/a")
        async with World(tmp_path, {"a/a": 40}, broken=frozenset({"a/a"})) as world:
            await world.operations.deploy([config], None, wait=True, sync=False)
            await world.operations.scale("a/a", 0, None)
            assert (await world.operations.status())["problems"] == []

    run(main())


def test_deploy_after_eviction_during_loading_reports_running_replica(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            config = DeploymentConfig("a/a", "a/a")
            await world.operations.deploy([config], None, wait=False, sync=False)
            await elapse(LOAD_S / 2)
            await world.operations.evict("a/a", None, cold=False)
            (answer,) = await world.operations.deploy([config], None, wait=True, sync=False)
            assert answer["problem"] is None
            (host,) = world.of("a/a")
            assert [host.placed.replica_id] == answer["replicas"]
            assert host.state is ReplicaState.RUNNING

    run(main())


def test_failed_restart_raises_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 40}) as world:
            await world.until_ended(await world.send("a/a"))
            world.sizes = {}
            with pytest.raises(OperationError, match="there is no such repository"):
                await world.operations.restart("a/a")

    run(main())


def test_restart_of_one_generation_keeps_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 10}) as world:
            for generation in ("0.7", "0.8"):
                await world.until_ended(await world.send("a/a", generation=generation))
            before = {host.placed.model_key: host for host in world.of("a/a")}
            restart = Restart(model="a/a", generation="0.7")
            (restarted,) = (await restart.perform(world.operations)).restarted
            assert restarted.model_key.endswith("@0.7")
            await elapse(60)
            after = {host.placed.model_key: host for host in world.of("a/a")}
            assert after.keys() == before.keys()
            changed = [key for key in after if after[key] is not before[key]]
            assert changed == [restarted.model_key]
            with pytest.raises(OperationError, match=r"has no replica for nnsight 0\.6"):
                await Restart(model="a/a", generation="0.6").perform(world.operations)

    run(main())


def test_restart_of_warm_replica_loads_it_on_device(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 70}) as world:
            await world.until_ended(await world.send("a/a"))
            await world.until_ended(await world.send("a/b"))
            (before,) = world.of("a/a")
            assert world.levels("a/a") == ["WARM"]
            (restarted,) = await world.operations.restart("a/a")
            assert restarted["replica_id"] == before.placed.replica_id
            await elapse(60)
            (after,) = world.of("a/a")
            assert after.state is ReplicaState.RUNNING
            assert after is not before

    run(main())


def test_model_is_not_loaded_for_departed_client(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 145}) as world:
            channel = await world.broker.subscribe()
            await world.send("a/a", subscription_id=channel.id)
            await channel.close()
            await elapse(60)
            assert world.actors == {}

    run(main())


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_never_exceed_memory_and_every_job_ends(
    tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    sizes = {f"a/m{i}": dice.choice([5, 20, 30, 60, 90, 100, 140, 300]) for i in range(6)}
    configs = tuple(
        DeploymentConfig(
            name,
            name,
            replicas=dice.choice([1, 1, 2]),
            dedicated=dice.random() < 0.2,
            device=dice.choice([None, None, "cpu"]),
        )
        for name in sizes
        if dice.random() < 0.5
    )
    broken = frozenset(name for name in sizes if dice.random() < 0.1)

    async def main() -> None:
        async with World(
            tmp_path,
            sizes,
            configs=configs,
            gpus=dice.choice([1, 2, 3]),
            minimum_s=dice.choice([0, 0, 60, 600]),
            broken=broken,
            bounds=Bounds(most=2, target_wait_s=20, idle_s=120, cooldown_s=30),
        ) as world:
            world.keep_up()
            ids = []
            for _ in range(60):
                await elapse(dice.expovariate(1 / 10))
                model = dice.choice([*sizes, "no/such"])
                match dice.choice(["send"] * 8 + ["evict", "scale", "restart", "die", "deploy"]):
                    case "send":
                        generation = dice.choice(["0.8", "0.8", "0.7"])
                        run_s = dice.choice([0.1, 1.0, 10.0, 100.0])
                        ids.append(await world.send(model, run_s, generation=generation))
                    case "die" if world.actors:
                        actor = dice.choice(list(world.actors.values()))
                        if any(h.actor is actor and h.is_up for h in world.controller.replicas()):
                            actor.die()
                    case operation:
                        await _operate(world, operation, model, dice)
            responses = await world.until_ended(*ids)
            for response in responses:
                assert response.description
            served = [r for r in responses if r.status is Status.COMPLETED]
            assert served, responses
            # The planned replicas are the existing ones.
            await elapse(300)
            for hosted in world.controller.replicas():
                assert world.controller.cluster.find(hosted.placed.key) == hosted.placed
            decided = {d.key for d in world.controller.cluster.replicas()}
            assert decided == {h.placed.key for h in world.controller.replicas()}

    run(main())


async def _operate(world: World, operation: str, model: str, dice: random.Random) -> None:
    # Operations on missing models are refused without side effects.
    with contextlib.suppress(OperationError):
        match operation:
            case "evict":
                await world.operations.evict(model, None, cold=dice.random() < 0.5)
            case "scale":
                await world.operations.scale(model, dice.randrange(4), None)
            case "restart":
                await world.operations.restart(model)
            case "deploy":
                config = DeploymentConfig(model, model, replicas=dice.choice([1, 2]))
                await world.operations.deploy([config], None, wait=False, sync=False)
