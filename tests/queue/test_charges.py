"""A job is charged for the time on its runner, however it ended; its record says who ended it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ndif.host import job as host_job
from ndif.host import lifecycle as host_lifecycle
from ndif.host.port import Respond
from ndif.schema.job_record import JobRecord
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.simulation.virtual_time import run
from tests.queue.test_whole import Actor, World
from tests.waiting import virtual_time_passes as elapse

NAME = "a/a"
WAITS_S, RUNS_S = 4.0, 100.0
"""Seconds until the job has a runner, and seconds that its block takes."""


class Forking(Actor):
    """An actor that gets a runner after a delay, as a real one may."""

    async def run(self, request: Request, respond: Respond) -> Response:
        asyncio.get_running_loop().call_later(WAITS_S, self._begin, request, respond)
        response = await super().run(request, respond)
        if response.status is not Status.COMPLETED:
            return response  # its runner was ended, and told nothing
        return replace(response, meta={"execution_time": float(request.payload) - WAITS_S})

    def _begin(self, request: Request, respond: Respond) -> None:
        if self._running is not None:
            self._begun = asyncio.ensure_future(
                respond(Response(request.id, Status.RUNNING, "It runs."))
            )


class Runners(World):
    kind = Forking

    @property
    def actor(self) -> Actor:
        return next(actor for actor in self.actors.values() if not actor.ended.is_set())


def record_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Runners, str], Awaitable[Any]],
    run_s: float = RUNS_S,
) -> JobRecord:
    """Return the record of a job that has waited for its runner when `end` is called."""
    records: list[JobRecord] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock = SimpleNamespace(time=lambda: 1e9 + loop.time())
        for module in (host_job, host_lifecycle):
            monkeypatch.setattr(module, "time", clock)
        async with Runners(folder, {NAME: 20}) as world:
            world.dispatcher.lifecycle.on_end = records.append
            await world.until_ended(await world.send(NAME, 0.0))  # it is loaded
            records.clear()
            job = await world.send(NAME, run_s)
            await elapse(WAITS_S)
            await end(world, job)
            await world.until_ended(job)

    run(main())
    (record,) = records
    return record


def test_job_that_an_operator_ends_is_charged_and_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(world: Runners, job: str) -> None:
        await elapse(9)
        assert await world.operations.kill(job)

    record = record_of(tmp_path, monkeypatch, end)
    assert record.execution_s == pytest.approx(9, abs=0.1)
    assert record.status == "CANCELLED"
    assert record.reason == "The server's operator has ended this job."
    assert not record.is_error


def test_job_whose_client_leaves_is_charged_and_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(world: Runners, job: str) -> None:
        await elapse(9)
        world.actor.cancel("The client left.")

    record = record_of(tmp_path, monkeypatch, end)
    assert record.execution_s == pytest.approx(9, abs=0.1)
    assert (record.status, record.reason) == ("CANCELLED", "The client left.")


def test_job_that_breaks_a_limit_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(world: Runners, job: str) -> None:
        await elapse(9)
        world.actor.cancel("The job took too much memory.")

    record = record_of(tmp_path, monkeypatch, end)
    assert record.execution_s == pytest.approx(9, abs=0.1)
    assert (record.status, record.reason) == ("ERROR", "")


def test_job_that_loses_every_replica_is_charged_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(world: Runners, job: str) -> None:
        await elapse(3)
        world.actor.die()
        await elapse(60)  # another replica loads and runs it
        world.actor.die()

    record = record_of(tmp_path, monkeypatch, end)
    assert record.status == "ERROR"
    assert 3 + 20 < record.execution_s < 60


def test_job_that_is_evicted_is_charged_for_its_last_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(world: Runners, job: str) -> None:
        (replica,) = world.of(NAME)
        await world.operations.evict(NAME, replica.placed.replica_id, cold=True)
        await elapse(40)  # longer than it may go on
        assert job not in world.ended

    record = record_of(tmp_path, monkeypatch, end, run_s=50.0)
    assert record.status == "COMPLETED"
    assert record.execution_s == pytest.approx(50 - WAITS_S, abs=0.1)


def test_job_that_is_ended_before_it_has_a_runner_costs_nothing(tmp_path: Path) -> None:
    records: list[JobRecord] = []

    async def main() -> None:
        async with Runners(tmp_path, {NAME: 20}) as world:
            world.dispatcher.lifecycle.on_end = records.append
            await world.until_ended(await world.send(NAME, 0.0))
            records.clear()
            job, waiting = await world.send(NAME, RUNS_S), await world.send(NAME)
            await elapse(WAITS_S / 2)
            assert await world.operations.kill(waiting)
            assert await world.operations.kill(job)

    run(main())
    assert [record.execution_s for record in records] == [0.0, 0.0]
    assert {record.status for record in records} == {"CANCELLED"}
