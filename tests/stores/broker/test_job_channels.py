"""Jobs that are sent over Redis to a replica in another process, and the reports of their ends."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ndif.host.execution import announcement
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import ClientLeftError
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.redis.job_channels import JobReceiver, JobSender
from ndif.stores.objects import FileStore
from ndif.tasks import within
from tests import frames
from tests.on_loop import on_loop
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import PATIENCE_S, time_passes_async

pytestmark = pytest.mark.engine

INLINE = 1000
SOON_S = 0.05
AGAIN_S = 2.0


@pytest.fixture(autouse=True)
def an_empty_queue(redis: RedisServer) -> None:
    """Empty the Redis that tests share."""
    redis.command("flushall")


@contextlib.asynccontextmanager
async def a_broker(redis: RedisServer, folder: Path) -> AsyncIterator[RedisBroker]:
    broker = RedisBroker(redis.url, FileStore(folder, 3600), SIGNER, inline_bytes=INLINE)
    await broker.start()
    yield broker
    await broker.stop()


@contextlib.asynccontextmanager
async def leading(broker: RedisBroker) -> AsyncIterator[JobSender]:
    lanes = JobSender(broker)
    lanes.start()
    yield lanes
    await lanes.stop()


@contextlib.asynccontextmanager
async def both_ends(
    redis: RedisServer, folder: Path
) -> AsyncIterator[tuple[RedisBroker, RedisBroker, JobSender]]:
    """Yield the leader's broker, a replica's broker, and the lanes between them."""
    async with (
        a_broker(redis, folder) as local,
        a_broker(redis, folder) as remote,
        leading(local) as lanes,
    ):
        yield local, remote, lanes


async def claimed(
    broker: RedisBroker, payload: bytes = b"opaque", subscription_id: str | None = None
) -> Request:
    key = ModelKey("a.B", "org/name")
    request = Request(
        key, "0.8", Wire.ENVELOPE, payload, True, "http://here", subscription_id=subscription_id
    )
    await broker.submit(request)
    return await broker.claim()


def running(lanes: JobSender, request: Request) -> asyncio.Task[Response | None]:
    news = asyncio.get_running_loop().create_future()
    return asyncio.create_task(lanes.run(request, announcement(request), "r", news))


@pytest.mark.parametrize("size", [1, INLINE, INLINE + 1])
@on_loop
async def test_job_arrives_with_payload_and_its_end_is_reported(
    redis: RedisServer, tmp_path: Path, size: int
) -> None:
    payload = bytes(range(256)) * 8
    async with both_ends(redis, tmp_path) as (local, remote, lanes):
        lane = await JobReceiver.open(remote, "r", lanes.introduction)
        request = await claimed(local, payload[:size])
        run = running(lanes, request)
        job = await lane.next()
        assert (job.id, job.model, job.wire) == (request.id, request.model, request.wire)
        assert bool(job.payload) is (size <= INLINE)
        assert await remote.payload(job) == payload[:size]
        await remote.complete(job, Response(job.id, Status.ERROR, "Too bad. " * 100))
        ended = await run
        assert ended is not None
        assert (ended.id, ended.status, ended.delivered) == (request.id, Status.ERROR, True)
        assert ended.description.startswith("Too bad.")


@on_loop
async def test_live_client_is_notified_that_job_is_dispatched(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with a_broker(redis, tmp_path) as local, leading(local) as lanes:
        lane = await JobReceiver.open(local, "r", lanes.introduction)
        channel = await local.subscribe()
        request = await claimed(local, subscription_id=channel.id)
        run = running(lanes, request)
        assert frames.read(await channel.next()) == announcement(request)
        job = await lane.next()
        response = Response(job.id, Status.COMPLETED)
        assert await local.publish(job, response)
        assert frames.read(await channel.next()) == response
        assert await run == Response(request.id, Status.COMPLETED, delivered=True)


@on_loop
async def test_job_of_disconnected_client_is_not_sent(redis: RedisServer, tmp_path: Path) -> None:
    async with a_broker(redis, tmp_path) as local, leading(local) as lanes:
        lane = await JobReceiver.open(local, "r", lanes.introduction)
        abandoned = await claimed(local, subscription_id="nobody")
        with pytest.raises(ClientLeftError):
            await running(lanes, abandoned)
        await local.release(abandoned)
        next_one = await claimed(local)
        run = running(lanes, next_one)
        assert (await lane.next()).id == next_one.id
        run.cancel()
        await local.release(next_one)


@on_loop
async def test_returned_job_ends_run_without_response(redis: RedisServer, tmp_path: Path) -> None:
    async with both_ends(redis, tmp_path) as (local, remote, lanes):
        lane = await JobReceiver.open(remote, "r", lanes.introduction)
        request = await claimed(local)
        run = running(lanes, request)
        await lane.give_back(await lane.next())
        assert await within(run, PATIENCE_S) is None
        await local.release(request)


@on_loop
async def test_run_does_not_wait_for_replica_that_does_not_listen(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with a_broker(redis, tmp_path) as local, leading(local) as lanes:
        request = await claimed(local)
        assert await within(running(lanes, request), PATIENCE_S) is None
        await local.release(request)


@on_loop
async def test_both_ends_receive_again_after_lost_connection(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with both_ends(redis, tmp_path) as (local, remote, lanes):
        lane = await JobReceiver.open(remote, "r", lanes.introduction)
        redis.command("client", "kill", "type", "pubsub")
        request = await claimed(local)
        run, heard = running(lanes, request), asyncio.create_task(lane.next())
        while not heard.done():
            finished, _ = await asyncio.wait(
                [run, heard], timeout=AGAIN_S, return_when=FIRST_COMPLETED
            )
            if heard in finished:
                break
            # No replica received the job, or the replica lost its connection, as a leader learns from Ray.
            assert run not in finished or run.result() is None
            run.cancel()
            await time_passes_async(SOON_S)
            run = running(lanes, request)
        assert heard.result().id == request.id
        while not run.done():
            await remote.complete(request, Response(request.id, Status.COMPLETED))
            await asyncio.wait([run], timeout=SOON_S)
        assert run.result() == Response(request.id, Status.COMPLETED, delivered=True)


@on_loop
async def test_malformed_job_message_is_ignored(redis: RedisServer, tmp_path: Path) -> None:
    async with a_broker(redis, tmp_path) as local, leading(local) as lanes:
        lane = await JobReceiver.open(local, "r", lanes.introduction)
        for content in (b"", b"\xff" * 5, b"\0\0\0\2{}", b"\0\0\0\1["):
            await local.client.publish("jobs:r", content)
        request = await claimed(local)
        run = running(lanes, request)
        assert (await within(lane.next(), PATIENCE_S)).id == request.id
        run.cancel()
        await local.release(request)
