"""The dashboard's state of models, nodes, queues and jobs, and its changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ndif.control import overview
from ndif.control.overview import PATIENCE_S
from ndif.schema.answer import from_plain, to_plain
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.job_record import JobRecord
from ndif.schema.public_state import NextState
from ndif.simulation.virtual_time import run
from tests.queue.test_whole import World
from tests.waiting import virtual_time_passes as elapse


@pytest.fixture(autouse=True)
def _a_look_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make looks cost no time; real time on a busy machine would delay the next look in virtual time."""
    monkeypatch.setattr(overview, "_SNAPSHOT_COST", 0)


async def next_of(world: World, last: str = "", users: Sequence[str] = ()) -> dict[str, Any]:
    """Return the next state as JSON, checked against its schema."""
    state = await world.overview.next(last, users)
    assert from_plain(NextState, to_plain(state)) == state
    plain: dict[str, Any] = to_plain(state)
    return plain


def models_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the models by name."""
    return {model["repo_id"]: model for model in state["models"]}


def test_job_is_counted_for_all_and_listed_only_for_its_user(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"a/a": 60, "a/b": 70}, minimum_s=600) as world:
            first = await next_of(world)
            assert models_of(first["state"]) == {}
            (node,) = first["state"]["nodes"]
            assert node["gpus"][0]["held"] == []
            running = await world.send("a/a", run_s=100.0, user="ada")
            waiting = await world.send("a/a", run_s=1.0, user="bob")
            await elapse(60)
            state = await next_of(world, first["name"], ["ada", "carol"])
            assert state["jobs"].keys() == {"ada"}
            (job,) = state["jobs"]["ada"]
            assert (job["id"], job["status"]) == (running, "DISPATCHED")
            assert "user" not in job
            model = models_of(state["state"])["a/a"]
            assert (model["level"], model["state"]) == ("HOT", "RUNNING")
            (queue,) = model["generations"]
            assert (queue["running"], queue["waiting"]) == (1, 1)
            assert queue["oldest"] is not None
            (replica,) = queue["replicas"]
            assert replica["busy"]
            assert model["protected_until"] == replica["deployed"] + 600
            (held,) = state["state"]["nodes"][0]["gpus"][0]["held"]
            assert (held["model"], held["level"]) == ("a/a", "HOT")
            for secret in ("ada", "bob", running, waiting):
                assert secret not in json.dumps(state["state"])
            await world.until_ended(running, waiting)
            await elapse(5)
            after = await next_of(world, state["name"], ["ada", "carol"])
            assert after["jobs"] == {}
            model = models_of(after["state"])["a/a"]
            (queue,) = model["generations"]
            assert (queue["running"], queue["waiting"]) == (0, 0)
            assert world.now().timestamp() - 10 < model["last_used"] <= world.now().timestamp()

    run(main())


def test_reader_of_current_state_waits_for_change(tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with World(tmp_path, {"a/a": 60}) as world:
            state = await next_of(world)
            before = loop.time()
            assert await next_of(world, state["name"]) == {
                "name": state["name"],
                "state": None,
                "jobs": {},
            }
            assert loop.time() - before >= PATIENCE_S
            before = loop.time()
            coming = asyncio.create_task(next_of(world, state["name"]))
            await elapse(0.5)
            await world.send("a/a")
            changed = await coming
            assert changed["name"] != state["name"]
            assert loop.time() - before < PATIENCE_S
            # Concurrent readers get the same state.
            assert await next_of(world) == changed

    run(main())


def test_state_shows_level_of_dedicated_and_evicted_model(tmp_path: Path) -> None:
    async def main() -> None:
        dedicated = DeploymentConfig("a/b", "a/b", dedicated=True)
        async with World(tmp_path, {"a/a": 60, "a/b": 70}, configs=(dedicated,)) as world:
            world.keep_up()
            await elapse(60)
            state = (await next_of(world))["state"]
            model = models_of(state)["a/b"]
            assert (model["level"], model["dedicated"]) == ("HOT", True)
            assert model["protected_until"] is None
            assert model["last_used"] is None
            assert state["schedule"] == []
            await world.operations.evict("a/b", None, cold=False)
            await elapse(60)
            state = (await next_of(world))["state"]
            assert models_of(state)["a/b"]["level"] == "WARM"
            assert [held["level"] for held in state["nodes"][0]["cpu"]["held"]] == ["WARM"]

    run(main())


def test_job_history_is_read_only_while_state_is_watched(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {}) as world:
            now = world.now().timestamp()
            for index in range(4):
                world.usage.record(
                    JobRecord(
                        str(index),
                        "ada",
                        "k",
                        "a/a",
                        "0.8",
                        "COMPLETED",
                        now - 2,
                        now - 1,
                        now,
                        1,
                        1,
                    )
                )
            state = await next_of(world)
            # The first state does not wait for the job history.
            state_after = await next_of(world, state["name"])
            (interval,) = state_after["state"]["history"]["intervals"]
            assert (interval["jobs"], interval["errors"]) == (4, 0)
            assert 1.6 < interval["total_s"][0] < 2.4
            assert 0.8 < interval["wait_s"][0] < 1.2
            assert "ada" not in json.dumps(state_after["state"])

    run(main())
