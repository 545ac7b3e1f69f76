"""Deployments with changed settings: the old replica continues to serve, and unspecified settings stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndif.control.operations import Deploy, parse_operation
from ndif.host.evaluation import Measured
from ndif.host.port import ActorError
from ndif.placement.replica import PlacedReplica
from ndif.schema.answer import to_plain
from ndif.schema.deployment import DeploymentConfig, OperationError
from ndif.schema.status import Status
from ndif.simulation.virtual_time import run
from tests.queue.test_whole import LOAD_S, Actor, World
from tests.waiting import virtual_time_passes as elapse

NAME = "a/a"
SERVING = DeploymentConfig(NAME, NAME, device="cuda")


class Fussy(World):
    """A server that rejects dtype float33, cannot load float8, and finds float64 too large."""

    async def _size(self, config: DeploymentConfig, generation: str) -> Measured:
        if config.dtype == "float33":
            raise ActorError("There is no dtype 'float33'")
        measured = await super()._size(config, generation)
        return replace(measured, size_bytes=10_000) if config.dtype == "float64" else measured

    def _make(self, config: DeploymentConfig, generation: str, place: PlacedReplica) -> Actor:
        broken = frozenset({NAME}) if config.dtype == "float8" else frozenset()
        actor = self.actors[place.key] = self.kind(place, self.memory, broken)
        return actor


def fussy(folder: Path, test: Callable[[Fussy], Any], *, size: int, gpus: int) -> None:
    """Run a test while a job is sent every second; each job must complete."""

    async def main() -> None:
        async with Fussy(folder, {NAME: size}, gpus=gpus) as world:
            await world.operations.deploy([SERVING], None, wait=True, sync=False)
            sent: list[str] = []

            async def keep_busy() -> None:
                while True:
                    sent.append(await world.send(NAME, 0.5, hotswapping=False))
                    await elapse(1)

            busy = asyncio.create_task(keep_busy())
            try:
                await test(world)
                await elapse(5)
            finally:
                busy.cancel()
            ended = await world.until_ended(*sent)
            assert {response.status for response in ended} == {Status.COMPLETED}
            assert (await world.operations.status())["problems"] == []

    run(main())


async def deploy(world: World, wait: bool = True, **settings: Any) -> Any:
    """Deploy the model with only these settings, as a client does."""
    fields = {"deployments": [{"repo_id": NAME, **settings}], "wait": wait}
    answer = await parse_operation(Deploy, fields).perform(world.operations)
    return to_plain(answer.models[0])


def replica_of(world: World) -> str:
    """Return the id of the serving replica, without replicas that are ending."""
    placed = {placed_replica.key for placed_replica in world.controller.cluster.replicas()}
    (replica,) = (
        replica_host
        for replica_host in world.of(NAME)
        if replica_host.serving and replica_host.placed.key in placed
    )
    return replica.placed.replica_id


def test_old_replica_serves_until_new_one_does(tmp_path: Path) -> None:
    async def test(world: Fussy) -> None:
        old = replica_of(world)
        deploying = asyncio.create_task(deploy(world, dtype="float32"))
        await elapse(LOAD_S / 2)
        assert replica_of(world) == old
        answer = await deploying
        assert answer["changes"] == [{"setting": "dtype", "before": "auto", "after": "float32"}]
        assert [row["replica_id"] for row in answer["evicted"]] == [old]
        assert answer["replicas"] == [replica_of(world)] != [old]
        assert (answer["problem"], answer["is_down"], answer["down_s"]) == (None, False, None)

    fussy(tmp_path, test, size=60, gpus=2)


def test_old_replica_leaves_first_if_both_do_not_fit(tmp_path: Path) -> None:
    async def test(world: Fussy) -> None:
        answer = await deploy(world, dtype="float32")
        assert answer["replicas"] == [replica_of(world)]
        assert answer["is_down"]
        assert LOAD_S <= answer["down_s"] <= LOAD_S + 5

    fussy(tmp_path, test, size=90, gpus=1)


def test_deploy_without_waiting_reports_expected_downtime(tmp_path: Path) -> None:
    async def test(world: Fussy) -> None:
        (model,) = world.controller.models
        model.load_s["0.8"] = 17.0
        answer = await deploy(world, wait=False, dtype="float32")
        assert (answer["is_down"], answer["down_s"]) == (True, 17.0)
        await elapse(LOAD_S + 5)
        assert answer["replicas"] == [replica_of(world)]

    fussy(tmp_path, test, size=90, gpus=1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float33"}, "There is no dtype 'float33'"),
        ({"dtype": "float64"}, "the largest node, here, has"),
        ({"dtype": "float64", "device": "cpu"}, "the largest node, here, has"),
    ],
)
def test_unusable_settings_leave_old_replica_serving(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    async def test(world: Fussy) -> None:
        old = replica_of(world)
        answer = await deploy(world, **settings)
        assert reason in answer["problem"]
        assert answer["problem"].endswith("'a/a' continues to serve with its previous settings.")
        assert (answer["replicas"], answer["evicted"], answer["changes"]) == ([old], [], [])
        assert replica_of(world) == old
        (model,) = world.controller.models
        assert model.config == SERVING

    fussy(tmp_path, test, size=60, gpus=1)


def test_unknown_device_is_rejected() -> None:
    with pytest.raises(OperationError, match=r"device must be auto, cpu, cuda, or one GPU"):
        parse_operation(Deploy, {"deployments": [{"repo_id": NAME, "device": "gpu"}]})


@pytest.mark.parametrize(
    ("size", "gpus", "ends"),
    [
        (60, 2, "'a/a' continues to serve with its previous settings."),
        (90, 1, "'a/a' was loaded again with its previous settings."),
    ],
)
def test_old_settings_are_restored_if_new_ones_cannot_be_loaded(
    size: int, gpus: int, ends: str, tmp_path: Path
) -> None:
    async def test(world: Fussy) -> None:
        answer = await deploy(world, dtype="float8", replicas=1, dedicated=True)
        assert "it is broken" in answer["problem"]
        assert answer["problem"].endswith(ends)
        assert (answer["replicas"], answer["changes"]) == ([], [])
        (model,) = world.controller.models
        assert model.config == SERVING
        assert world.levels(NAME) == ["HOT"]
        (again,) = await world.operations.deploy([SERVING], None, wait=True, sync=False)
        assert again["replicas"] == [replica_of(world)]
        assert again["evicted"] == []

    fussy(tmp_path, test, size=size, gpus=gpus)


def test_model_evicted_during_replacement_does_not_return(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fussy(tmp_path, {NAME: 90}) as world:
            await world.operations.deploy([SERVING], None, wait=True, sync=False)
            deploying = asyncio.create_task(deploy(world, dtype="float8"))
            await elapse(LOAD_S / 2)
            await world.operations.evict(NAME, None, cold=True)
            assert (await deploying)["replicas"] == []
            await elapse(2 * LOAD_S)
            assert world.of(NAME) == []

    run(main())


def test_deployments_of_one_model_run_sequentially(tmp_path: Path) -> None:
    async def test(world: Fussy) -> None:
        deploying = []
        for dtype in ("float32", "float16", "bfloat16"):
            deploying.append(asyncio.create_task(deploy(world, dtype=dtype)))
            await elapse(3)  # it is checked, and the first of them loads
        answers = await asyncio.gather(*deploying)
        assert [answer["problem"] for answer in answers] == [None] * 3
        (model,) = world.controller.models
        assert model.config.dtype == "bfloat16"
        assert answers[2]["replicas"] == [replica_of(world)]

    fussy(tmp_path, test, size=60, gpus=2)


def test_sync_evicts_no_model_if_deployment_fails(tmp_path: Path) -> None:
    async def main() -> None:
        async with Fussy(tmp_path, {NAME: 20, "a/b": 20}) as world:
            other = DeploymentConfig("a/b", "a/b")
            await world.operations.deploy([SERVING, other], None, wait=True, sync=False)
            wrong = replace(SERVING, dtype="float33")
            (answer,) = await world.operations.deploy([wrong], None, wait=True, sync=True)
            assert "float33" in answer["problem"]
            assert world.levels("a/b") == ["HOT"]

    run(main())


def test_unspecified_settings_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {NAME: 20}, gpus=2) as world:
            first = await deploy(world, dedicated=True, replicas=2, max_replicas=3)
            assert first["changes"] == []
            again = await deploy(world)
            assert again["changes"] == []
            assert sorted(again["replicas"]) == sorted(first["replicas"])
            (model,) = world.controller.models
            assert (model.config.dedicated, model.config.replicas) == (True, 2)
            answer = await deploy(world, dedicated=False, replicas=1)
            assert answer["changes"] == [
                {"setting": "replicas", "before": 2, "after": 1},
                {"setting": "dedicated", "before": True, "after": False},
            ]
            assert len(answer["replicas"]) == 1
            with pytest.raises(OperationError, match="max_replicas is 3, but replicas"):
                await deploy(world, replicas=4)

    run(main())


def test_sync_resets_unspecified_settings_to_defaults(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {NAME: 20}, gpus=2) as world:
            await deploy(world, dedicated=True, replicas=2)
            fields = {"deployments": [NAME], "wait": True, "sync": True}
            answer = await parse_operation(Deploy, fields).perform(world.operations)
            (planned,) = to_plain(answer)["models"]
            assert [change["setting"] for change in planned["changes"]] == ["replicas", "dedicated"]

    run(main())


@pytest.mark.parametrize("dedicated", [False, True])
def test_deploying_unknown_repository_leaves_no_model(dedicated: bool, tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {}) as world:
            world.keep_up()
            answer = await deploy(world, dedicated=dedicated)
            assert "there is no such repository" in answer["problem"]
            await elapse(90)
            status = await world.operations.status()
            assert (status["problems"], status["models"]) == ([], [])

    run(main())


def test_every_key_can_use_deployed_model_while_it_loads(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {NAME: 20}) as world:
            deploying = asyncio.create_task(deploy(world))
            await elapse(LOAD_S / 2)  # it is loading
            early = await world.send(NAME, hotswapping=False)
            await deploying
            late = await world.send(NAME, hotswapping=False)
            ended = await world.until_ended(early, late)
            assert {response.status for response in ended} == {Status.COMPLETED}
            other = await world.send(NAME, hotswapping=False, generation="0.7")
            (refused,) = await world.until_ended(other)
            await world.operations.evict(NAME, None, cold=False)
            (evicted,) = await world.until_ended(await world.send(NAME, hotswapping=False))
            assert (
                "loaded for clients of nnsight 0.8 now, not for clients of 0.7"
                in refused.description
            )
            assert "no model is deployed on this server now" in evicted.description

    run(main())


def test_job_without_hotswapping_survives_loss_of_deployed_replica(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {NAME: 20}) as world:
            await deploy(world)
            running = await world.send(NAME, 10.0, hotswapping=False)
            await elapse(1)
            (actor,) = world.actors.values()
            actor.die()
            (ended,) = await world.until_ended(running)
            assert ended.status is Status.COMPLETED

    run(main())


def test_model_loaded_on_demand_requires_hotswapping_right(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {NAME: 20}) as world:
            await world.until_ended(await world.send(NAME))
            (refused,) = await world.until_ended(await world.send(NAME, hotswapping=False))
            assert "needs the right `hotswapping`" in refused.description

    run(main())
