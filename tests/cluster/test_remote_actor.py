"""A replica whose leaders change: it performs each request once, regardless of callers and repetitions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import pytest

from ndif.cluster.remote_actor import (
    JobAnswer,
    MoveAnswer,
    ReplicaDescription,
    ReplicaOrder,
)
from ndif.placement.replica import DeploymentLevel, PlacedReplica
from ndif.runtime.typed_json import from_json, to_json
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.server.node_actor import NodeActor
from ndif.stores.broker.encoding import encode_request
from ndif.stores.broker.signing import PROTOCOL
from ndif.tasks import within
from tests.host.stand_in import FAILS, MODEL, StandIn, Waiting
from tests.on_loop import on_loop
from tests.waiting import PATIENCE_S

ORDER = to_json(
    ReplicaOrder(
        DeploymentConfig("a/b", "/nowhere"),
        "0.8",
        PlacedReplica("a/b", "r1", "node", DeploymentLevel.HOT, 1, deployed=0.0),
    )
)
BRIEFLY = {"for_s": 0.01}
DELIVERED = Response(
    "",
    Status.COMPLETED,
    "Done.",
    meta={"execution_time": 0.0, "peak_memory": 0},
    delivered=True,
)
"""The final response of a completed job, without its id."""


def briefly(answer: JobAnswer) -> Response:
    """Return the final response of an answer without id and steps; check the names of the steps."""
    assert answer.end is not None
    assert [step[:2] for step in answer.end.steps] == [
        (name, "replica") for name in ("queued", "dispatched", "running")
    ]
    return replace(answer.end, id="", steps=())


def description(answer: JobAnswer) -> str:
    assert answer.end is not None
    return answer.end.description


async def described(replica: StandIn) -> ReplicaDescription:
    return from_json(ReplicaDescription, await replica.describe())


async def moved(answer: Awaitable[bytes]) -> MoveAnswer:
    return from_json(MoveAnswer, await answer)


def a_request(subscription_id: str | None = "me", **more: Any) -> Request:
    key = ModelKey("a.B", "a/b")
    return Request(
        key,
        "0.8",
        Wire.ENVELOPE,
        b"",
        False,
        "http://here",
        subscription_id=subscription_id,
        **more,
    )


@contextlib.asynccontextmanager
async def a_replica() -> AsyncIterator[StandIn]:
    replica = StandIn(ORDER)
    assert await moved(replica.start()) == MoveAnswer(MODEL)
    yield replica
    await replica.stop()


def running(replica: StandIn, request: Request) -> asyncio.Task[JobAnswer]:
    async def run() -> JobAnswer:
        return from_json(JobAnswer, await replica.run(encode_request(request)))

    return asyncio.create_task(run())


@on_loop
async def test_replica_delivers_result_and_answers_with_summary() -> None:
    async with a_replica() as replica:
        request = a_request(env=BRIEFLY)
        assert briefly(await running(replica, request)) == DELIVERED
        assert [r.status for r in replica.responses] == [Status.RUNNING, Status.COMPLETED]


@on_loop
async def test_jobs_run_one_at_a_time_in_order() -> None:
    async with a_replica() as replica:
        requests = [a_request(env=BRIEFLY) for _ in range(5)]
        await asyncio.gather(*(running(replica, request) for request in requests))
        assert replica.actor.ran == [request.id for request in requests]


@on_loop
async def test_repeated_run_call_waits_for_same_run() -> None:
    async with a_replica() as replica:
        request = a_request(env={"for_s": 0.1})
        first = running(replica, request)
        await replica.actor.runs.wait()
        first.cancel()  # the caller is gone
        second, third = running(replica, request), running(replica, request)
        answer = await second
        assert answer == await third
        assert briefly(answer) == DELIVERED
        assert replica.actor.ran == [request.id]


@on_loop
async def test_completed_job_is_not_run_again() -> None:
    async with a_replica() as replica:
        live, polled = a_request(env=BRIEFLY), a_request(None, env=BRIEFLY)
        for request in (live, polled):
            await running(replica, request)
        replica.responses.clear()
        for request in (live, polled):
            assert briefly(await running(replica, request)) == DELIVERED
        assert replica.responses == []
        # The next leader has meanwhile stored QUEUED for the polling client.
        replica.kept[polled.id] = Status.QUEUED
        for request in (live, polled):
            assert briefly(await running(replica, request)) == DELIVERED
        assert replica.actor.ran == [live.id, polled.id]
        assert replica.responses == [Response(polled.id, Status.COMPLETED, "Done.")]
        assert (await described(replica)).requests == (live.id, polled.id)


@pytest.mark.parametrize("outcome", ["evicted", "lost"])
@on_loop
async def test_evicted_or_lost_job_may_run_again(outcome: str) -> None:
    async with a_replica() as replica:
        request = a_request()
        for _ in range(2):
            run = running(replica, request)
            await replica.actor.runs.wait()
            if outcome == "evicted":
                await replica.to_cache()
            else:
                replica.actor.die()
            assert (await run).why == outcome
            await replica.from_cache({})
        assert replica.actor.ran == [request.id] * 2


@on_loop
async def test_evicted_job_from_channel_is_given_back() -> None:
    async with a_replica() as replica:
        completed, evicted = a_request(env=BRIEFLY), a_request()
        for request in (completed, evicted):
            replica.jobs.put_nowait(request)
        while replica.actor.ran != [completed.id, evicted.id]:
            await replica.actor.runs.wait()
            await asyncio.sleep(0)
        await replica.actor.runs.wait()
        await replica.to_cache()
        assert (await within(replica.given_back.get(), PATIENCE_S)).id == evicted.id
        assert replica.given_back.empty()


@on_loop
async def test_running_and_waiting_jobs_are_cancelled() -> None:
    async with a_replica() as replica:
        first, second, third = a_request(), a_request(), a_request(env=BRIEFLY)
        runs = [running(replica, request) for request in (first, second, third)]
        await replica.actor.runs.wait()
        await replica.cancel(second.id, "Second.")
        await replica.cancel(first.id, "First.")
        await replica.cancel("another", "Nobody.")
        answers = await asyncio.gather(*runs)
        assert [*map(description, answers)] == ["First.", "Second.", "Done."]
        assert replica.actor.ran == [first.id, third.id]


@on_loop
async def test_job_is_cancelled_before_it_arrives() -> None:
    async with a_replica() as replica:
        request = a_request()
        await replica.cancel(request.id, "Never mind.")
        assert description(await running(replica, request)) == "Never mind."
        assert replica.actor.ran == []


@on_loop
async def test_revoked_cancel_lets_later_job_run() -> None:
    async with a_replica() as replica:
        request = a_request(env=BRIEFLY)
        await replica.cancel(request.id, "The client left.")
        await replica.revoke_cancel(request.id)
        assert briefly(await running(replica, request)) == DELIVERED


@on_loop
async def test_revoked_cancel_does_not_restore_waiting_job() -> None:
    async with a_replica() as replica:
        first, second = a_request(), a_request()
        runs = [running(replica, request) for request in (first, second)]
        await replica.actor.runs.wait()
        await replica.cancel(second.id, "The client left.")
        await replica.revoke_cancel(second.id)
        await replica.cancel(first.id, "First.")
        answers = await asyncio.gather(*runs)
        assert [*map(description, answers)] == ["First.", "The client left."]


@on_loop
async def test_job_from_channel_and_call_runs_once() -> None:
    async with a_replica() as replica:
        first, second = a_request(env=BRIEFLY), a_request(env=BRIEFLY)
        for request in (first, first, second):
            replica.jobs.put_nowait(request)
        assert briefly(await running(replica, second)) == DELIVERED
        assert briefly(await running(replica, first)) == DELIVERED
        assert sorted(replica.actor.ran) == sorted([first.id, second.id])
        assert [r.status for r in replica.responses].count(Status.COMPLETED) == 2


@on_loop
async def test_job_of_absent_client_does_not_block_others() -> None:
    """A previous leader would have cancelled the job."""
    async with a_replica() as replica:
        abandoned, kept = a_request("absent"), a_request(env=BRIEFLY)
        run = running(replica, abandoned)
        await replica.actor.runs.wait()
        replica.gone.add("absent")
        assert briefly(await running(replica, kept)) == DELIVERED
        assert description(await run) == "The client left."


@on_loop
async def test_undeliverable_result_is_reported() -> None:
    async with a_replica() as replica:
        replica.cannot_tell = True
        answer = await running(replica, a_request(env=BRIEFLY))
        assert answer.end is not None
        assert (answer.end.status, answer.end.delivered) == (Status.ERROR, False)
        assert "could not be delivered" in answer.end.description


@on_loop
async def test_job_with_undeliverable_result_is_not_run_again() -> None:
    async with a_replica() as replica:
        replica.cannot_tell = True
        for request in (a_request(env=BRIEFLY), a_request(None, env=BRIEFLY)):
            ends = [(await running(replica, request)).end for _ in range(2)]
            assert [end.delivered for end in ends if end is not None] == [False, False]
            assert replica.actor.ran.count(request.id) == 1


@on_loop
async def test_repeated_moves_to_and_from_cache_happen_once() -> None:
    async with a_replica() as replica:
        begun = (await described(replica)).order.place
        assert begun is not None
        assert begun.deployed > 0
        for _ in range(2):
            await replica.to_cache()
        warm = await described(replica)
        assert (warm.level, warm.moving) == (DeploymentLevel.WARM, False)
        for _ in range(2):
            assert await moved(replica.from_cache({1: 5})) == MoveAnswer(MODEL)
        hot = await described(replica)
        assert hot.level is DeploymentLevel.HOT
        assert hot.order.place is not None
        assert hot.order.place.gpu_mem_bytes_by_id == {1: 5}
        assert hot.order.place.deployed > begun.deployed
        assert replica.actor.moves == ["to", "from"]


@on_loop
async def test_replica_that_fails_to_load_has_ended() -> None:
    replica = StandIn(ORDER)
    replica.actor = Waiting(fails=True)
    reported = asyncio.create_task(replica.progress((0, 0)))
    assert (
        await asyncio.gather(moved(replica.start()), moved(replica.start()))
        == [MoveAnswer(error=FAILS)] * 2
    )
    assert await reported == (1, 2)
    await replica.until_ended()
    assert (await described(replica)).ended


@on_loop
async def test_replica_ends_with_its_processes() -> None:
    async with a_replica() as replica:
        ending = asyncio.create_task(replica.until_ended())
        replica.actor.die()
        await ending


@on_loop
async def test_calls_before_start_are_answered() -> None:
    replica = StandIn(ORDER)
    last_description = await described(replica)
    assert (last_description.level, last_description.ended, last_description.model) == (
        None,
        False,
        None,
    )
    assert (await running(replica, a_request())).why == "lost"
    assert (await moved(replica.from_cache({}))).error
    await replica.stop()
    assert (await moved(replica.start())).error


# Actors on a node


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "NDIF_BROKER_URL"),
        ({"NDIF_BROKER_URL": "redis://127.0.0.1:1"}, "NDIF_OBJECT_STORE_URL"),
        ({"NDIF_OBJECT_STORE_URL": "http://10.0.0.1:1"}, "settings are not valid"),
    ],
)
def test_node_without_required_settings_reports_reason(
    variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NDIF_BROKER_URL", "NDIF_OBJECT_STORE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logging.root, "level", logging.root.level)  # the actor sets its own
    answer = asyncio.run(moved(NodeActor(ORDER).start()))
    assert why in answer.error


def test_leader_of_another_version_cannot_start_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_BROKER_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("NDIF_OBJECT_STORE_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(logging.root, "level", logging.root.level)

    async def answer_of_start() -> MoveAnswer:
        actor = NodeActor(ORDER)
        await actor.follow(
            {"protocol": PROTOCOL + 1, "secrets": ["s"], "term": "t", "broker_password": None}
        )
        return await moved(actor.start())

    assert (
        "has another version than on the leader's machine" in asyncio.run(answer_of_start()).error
    )
