"""The contract of every form of `Broker`. The fixture `opening` lists the forms."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from ndif.schema import wires
from ndif.schema.model_key import ModelKey
from ndif.schema.payload import PayloadFile
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status
from ndif.stores.broker import Broker, BrokerError, MemoryBroker, QueueFullError, TooManyJobsError
from ndif.stores.broker.redis import broker as broker_module
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.spool import Spool
from ndif.stores.objects import FileStore
from ndif.tasks import end, within
from tests import frames
from tests.on_loop import on_loop
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = pytest.mark.engine

Opening = Callable[..., AbstractAsyncContextManager[Broker]]
SOON_S = 0.05
INLINE = 100_000


@contextlib.asynccontextmanager
async def memory(max_bytes: int | None = None) -> AsyncIterator[Broker]:
    yield MemoryBroker(max_bytes)


def on_redis(url: str, folder: Path) -> Opening:
    @contextlib.asynccontextmanager
    async def opening(max_bytes: int | None = None) -> AsyncIterator[Broker]:
        objects = FileStore(folder, 3600)
        broker = RedisBroker(
            url, objects, SIGNER, inline_bytes=INLINE, max_bytes=max_bytes, counts_attempts=True
        )
        await broker.client.flushall()
        await broker.start()
        yield broker
        await broker.stop()

    return opening


def with_spool(folder: Path) -> Opening:
    @contextlib.asynccontextmanager
    async def opening(max_bytes: int | None = None) -> AsyncIterator[Broker]:
        spool = Spool(folder / "spool", FileStore(folder, 3600))
        broker = MemoryBroker(max_bytes, spool)
        await broker.start()
        yield broker
        await broker.stop()

    return opening


@pytest.fixture(params=["memory", "spool", "redis"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Opening:
    if request.param == "memory":
        return memory
    if request.param == "spool":
        return with_spool(tmp_path)
    return on_redis(request.getfixturevalue("redis").url, tmp_path)


def make_request(subscription_id: str | None = None, payload: bytes = b"opaque") -> Request:
    return Request(
        model=ModelKey("a.B", "org/name", "v2", "fill-mask"),
        generation="0.8",
        wire=Wire.ENVELOPE,
        payload=payload,
        compress=True,
        base_url="http://here",
        subscription_id=subscription_id,
        env={"peft": "org/adapter"},
    )


async def until_gone(store: FileStore, key: str) -> None:
    async def is_gone() -> bool:
        return await store.get(key) is None

    await eventually(is_gone)


def update(request: Request, text: str) -> Response:
    return Response(request.id, Status.LOG, text)


# Requests


@on_loop
async def test_available_broker_answers_ping(opening: Opening) -> None:
    async with opening() as broker:
        await broker.ping()


@on_loop
async def test_requests_are_claimed_in_order_of_submission(opening: Opening) -> None:
    async with opening() as broker:
        sent = [make_request() for _ in range(20)]
        for request in sent:
            await broker.submit(request)
        claimed = [await broker.claim() for _ in sent]
    assert [job.id for job in claimed] == [job.id for job in sent]


@on_loop
async def test_a_request_is_claimed_as_it_was_submitted(opening: Opening) -> None:
    async with opening() as broker:
        sent = make_request("somebody", bytes(range(256)) * 4000)
        await broker.submit(sent)
        claimed = await broker.claim()
        assert replace(claimed, payload=await broker.payload(claimed)) == sent


@pytest.mark.parametrize("is_live", [False, True])
@on_loop
async def test_payload_file_is_deleted_when_its_request_ends(
    opening: Opening, is_live: bool, tmp_path: Path
) -> None:
    content = bytes(range(256)) * 20_000
    async with opening() as broker:
        file = broker.create_payload()
        file.append(content)
        await broker.submit(replace(make_request("somebody" if is_live else None), payload=file))
        claimed = await broker.claim()
        payload = await broker.payload(claimed)
        reader = (
            os.fdopen(payload.open(), "rb")
            if isinstance(payload, PayloadFile)
            else io.BytesIO(payload)
        )
        start = reader.read(1 << 20)
        await broker.release(claimed)
        with reader:
            assert start + reader.read() == content  # an open reader can continue
        del payload, claimed
        assert not file.path.exists()


@on_loop
async def test_env_of_request_counts_towards_queue_size(opening: Opening) -> None:
    async with opening(max_bytes=100_000) as broker:
        await broker.submit(replace(make_request(), env={"a": [[]] * 1000}))
        with pytest.raises(QueueFullError):
            await broker.submit(make_request(payload=bytes(30_000)))


@on_loop
async def test_unfinished_requests_per_key_are_limited(opening: Opening) -> None:
    def of(key: str) -> Request:
        return replace(make_request(), key=key)

    async with opening() as broker:
        attempts = [broker.submit(of("a"), most_of_key=3) for _ in range(10)]
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, TooManyJobsError)]
        assert (outcomes.count(None), len(refused)) == (3, 7)
        assert "may have 3 jobs" in str(refused[0])
        # Other keys are counted separately, and requests without a limit are accepted.
        await broker.submit(of("b"), most_of_key=3)
        await broker.submit(of("c"))
        first = await broker.claim()
        await broker.complete(first, Response(first.id, Status.COMPLETED))
        await broker.submit(of("a"), most_of_key=3)
        with pytest.raises(TooManyJobsError):
            await broker.submit(of("a"), most_of_key=3)


@on_loop
async def test_unfinished_requests_per_model_are_limited(opening: Opening) -> None:
    def of(model: str, key: str, subscription_id: str | None = None) -> Request:
        request = make_request(subscription_id)
        return replace(request, model=ModelKey("a.B", model), key=key)

    async with opening() as broker:
        attempts = [broker.submit(of("org/a", f"{n}"), most_of_model=3) for n in range(10)]
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, TooManyJobsError)]
        assert (outcomes.count(None), len(refused)) == (3, 7)
        assert "3 jobs that wait or run of 'org/a' at once" in str(refused[0])
        # Other models are counted separately, and another key may have a higher limit.
        await broker.submit(of("org/b", ""), most_of_model=3)
        await broker.submit(of("org/a", "x"), most_of_model=4)
        channel = await broker.subscribe()
        await broker.submit(of("org/c", "x", channel.id), most_of_model=1)
        claimed = [await broker.claim() for _ in range(6)]
        # However a request ends, it is subtracted exactly once.
        await broker.release(claimed[0])
        await broker.release(claimed[0])
        await broker.complete(claimed[1], Response(claimed[1].id, Status.COMPLETED))
        await broker.publish(claimed[5], Response(claimed[5].id, Status.ERROR))
        await broker.submit(of("org/c", "x", channel.id), most_of_model=1)
        await broker.submit(of("org/a", ""), most_of_model=3)
        with pytest.raises(TooManyJobsError):
            await broker.submit(of("org/a", ""), most_of_model=3)


@on_loop
async def test_client_with_too_many_unread_updates_is_disconnected_once(opening: Opening) -> None:
    async with opening() as broker:
        subscription, calls, is_called = await broker.subscribe(), [], asyncio.Event()

        def disconnect() -> None:
            calls.append(1)
            is_called.set()

        subscription.bound(1000, disconnect)
        request = make_request(subscription.id)
        await broker.submit(request)
        queued = Response(request.id, Status.QUEUED, "q" * 300)
        for _ in range(3):
            await broker.publish(request, queued)
        for _ in range(3):  # a client that reads stays connected
            await within(subscription.next(), PATIENCE_S)
        for _ in range(10):
            await broker.publish(request, queued)
        await within(is_called.wait(), PATIENCE_S)
        assert calls == [1]


@on_loop
async def test_each_request_is_claimed_once(opening: Opening) -> None:
    async with opening() as broker:
        claims = [asyncio.create_task(broker.claim()) for _ in range(4)]
        await asyncio.sleep(0)
        sent = [make_request() for _ in range(4)]
        for request in sent:
            await broker.submit(request)
        claimed = await asyncio.gather(*claims)
    assert sorted(job.id for job in claimed) == sorted(job.id for job in sent)


@on_loop
async def test_cancelled_claim_loses_no_request(opening: Opening) -> None:
    async with opening() as broker:
        for is_late in (False, True):
            claim = asyncio.create_task(broker.claim())
            await time_passes_async(SOON_S)
            request = make_request()
            if is_late:
                # The claim is woken, and cancelled before it continues.
                await broker.submit(request)
            claim.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert (await claim).id == request.id
                continue
            if not is_late:
                await broker.submit(request)
            assert (await broker.claim()).id == request.id


# Live channels


@on_loop
async def test_channel_id_is_random_or_given(opening: Opening) -> None:
    async with opening() as broker:
        names = {(await broker.subscribe()).id for _ in range(50)}
        assert len(names) == 50
        # Ids cannot be guessed.
        assert all(len(name) >= 32 for name in names)
        assert (await broker.subscribe("a-socket-io-id")).id == "a-socket-io-id"


@on_loop
async def test_updates_reach_channel_of_their_request_in_order(opening: Opening) -> None:
    async with opening() as broker:
        first, second = await broker.subscribe(), await broker.subscribe()
        for number in range(10):
            for channel in (first, second):
                request = make_request(channel.id)
                await broker.publish(request, update(request, f"{channel.id} {number}"))
        for channel in (first, second):
            descriptions = [frames.read(await channel.next()).description for _ in range(10)]
            assert descriptions == [f"{channel.id} {number}" for number in range(10)]


@on_loop
async def test_update_has_wire_form_of_its_client(opening: Opening) -> None:
    async with opening() as broker:
        channel = await broker.subscribe()
        for wire, inline, streamed in (
            (Wire.ENVELOPE, InlineResult(bytes(range(256)), True), None),
            (Wire.HEADERS, InlineResult(bytes(range(256)), False), b"\x00\xff"),
        ):
            stored = StoredResult("http://here/results/x", 7)
            for number, data in enumerate((None, inline, streamed, stored)):
                request = replace(make_request(channel.id), wire=wire)
                text, meta = f"Done. 🗼 {number}", {"peak_memory": 1 << 40}
                sent = Response(request.id, Status.COMPLETED, text, data, meta)
                await broker.publish(request, sent)
                assert await channel.next() == wires.frame(request, sent)


@on_loop
async def test_channel_receives_updates_of_all_its_requests(opening: Opening) -> None:
    async with opening() as broker:
        channel = await broker.subscribe()
        requests = [make_request(channel.id) for _ in range(3)]
        for request in requests:
            await broker.publish(request, update(request, ""))
        assert [frames.read(await channel.next()).id for _ in requests] == [
            job.id for job in requests
        ]


@on_loop
async def test_channel_lists_its_unfinished_requests(opening: Opening) -> None:
    async with opening() as broker:
        channel, other = await broker.subscribe(), await broker.subscribe()
        requests = [make_request(channel.id) for _ in range(2)]
        for request in requests:
            await broker.submit(request)
            await broker.publish(await broker.claim(), update(request, "under way"))
            await channel.next()
        assert {*channel.unfinished} == {request.id for request in requests}
        await broker.publish(requests[0], Response(requests[0].id, Status.COMPLETED))
        await channel.next()
        assert {*channel.unfinished} == {requests[1].id}
        assert not {*other.unfinished}


@on_loop
async def test_clients_are_notified_of_requests_that_redis_lost(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_POLL_S", SOON_S)
    async with on_redis(redis.url, tmp_path)() as broker:
        channel = await broker.subscribe()
        ended, claimed, unclaimed = [make_request(channel.id) for _ in range(3)]
        for request in (ended, claimed):
            await broker.submit(request)
            assert (await broker.claim()).id == request.id
        response = Response(ended.id, Status.COMPLETED)
        await broker.publish(ended, response)
        await broker.submit(unclaimed)
        await time_passes_async(5 * SOON_S)
        redis.command("flushall")
        responses = [frames.read(await within(channel.next(), PATIENCE_S)) for _ in range(3)]
        assert responses[0] == response
        assert {response.id for response in responses[1:]} == {claimed.id, unclaimed.id}
        for end_response in responses[1:]:
            assert end_response.status is Status.ERROR
            assert "Send it again" in end_response.description
        # A new request is served.
        following = make_request(channel.id)
        await broker.submit(following)
        while (await within(broker.claim(), PATIENCE_S)).id != following.id:
            pass
        await broker.publish(following, Response(following.id, Status.COMPLETED))
        assert frames.read(await channel.next()).id == following.id
        assert not {*channel.unfinished}


@on_loop
async def test_waiting_channel_is_woken_by_update(opening: Opening) -> None:
    async with opening() as broker:
        channel = await broker.subscribe()
        waiting = asyncio.create_task(channel.next())
        await time_passes_async(SOON_S)
        assert not waiting.done()
        request = make_request(channel.id)
        await broker.publish(request, update(request, "now"))
        assert frames.read(await waiting).description == "now"


@on_loop
async def test_update_without_listening_channel_is_dropped(opening: Opening) -> None:
    async with opening() as broker:
        unheard = make_request("later")
        await broker.publish(unheard, update(unheard, "too early"))
        polled = make_request(None)
        await broker.publish(polled, update(polled, "to nobody"))
        channel = await broker.subscribe("later")
        await broker.publish(unheard, update(unheard, "heard"))
        assert frames.read(await channel.next()).description == "heard"


@on_loop
async def test_closed_channel_receives_no_updates(opening: Opening) -> None:
    async with opening() as broker:
        channel = await broker.subscribe("again")
        await channel.close()
        request = make_request("again")
        await broker.publish(request, update(request, "to nobody"))
        channel = await broker.subscribe("again")
        await broker.publish(request, update(request, "to the new one"))
        assert frames.read(await channel.next()).description == "to the new one"


@on_loop
async def test_session_is_connected_while_its_channel_is_open(opening: Opening) -> None:
    async with opening() as broker:
        assert await broker.disconnected(["nobody"]) == {"nobody"}
        channel, other = await broker.subscribe(), await broker.subscribe()
        assert not await broker.disconnected([channel.id])
        await channel.close()
        assert await broker.disconnected([channel.id])
        assert not await broker.disconnected([other.id])
        await channel.close()
        assert not await broker.disconnected([other.id])


@on_loop
async def test_channel_accepts_requests_only_of_its_first_user(opening: Opening) -> None:
    async with opening() as broker:
        first, second = await broker.subscribe(), await broker.subscribe()
        assert await broker.takes(first.id, "ada")
        assert await broker.takes(second.id, "bob")
        assert not await broker.takes(first.id, "bob")
        assert await broker.takes(first.id, "ada")


@on_loop
async def test_closing_older_channel_keeps_newer_of_same_id_open(opening: Opening) -> None:
    async with opening() as broker:
        older, newer = await broker.subscribe("name"), await broker.subscribe("name")
        await older.close()
        assert not await broker.disconnected(["name"])
        request = make_request("name")
        await broker.publish(request, update(request, "to the newer"))
        assert frames.read(await newer.next()).description == "to the newer"


@on_loop
async def test_departure_of_client_is_noticed(opening: Opening) -> None:
    async with opening() as broker:
        await broker.until_disconnected("nobody")
        channel = await broker.subscribe()
        both = [asyncio.create_task(broker.until_disconnected(channel.id)) for _ in range(2)]
        await time_passes_async(SOON_S)
        assert not any(task.done() for task in both)
        await channel.close()
        await asyncio.gather(*both)
        await broker.until_disconnected(channel.id)


# Uploads


@on_loop
async def test_uploads_reach_job_in_order_before_and_after_it_waits(
    opening: Opening,
) -> None:
    async with opening() as broker:
        request = make_request((await broker.subscribe()).id)
        await broker.submit(request)
        await broker.upload(request.id, request.subscription_id or "", b"before the claim")
        claimed = await broker.claim()
        assert await broker.uploaded(claimed) == b"before the claim"
        waiting = asyncio.create_task(broker.uploaded(claimed))
        await time_passes_async(SOON_S)
        assert not waiting.done()
        await broker.upload(request.id, request.subscription_id or "", b"")
        assert await waiting == b""
        for content in (bytes(range(256)), b"third"):
            await broker.upload(request.id, request.subscription_id or "", content)
            assert await broker.uploaded(claimed) == content


@on_loop
async def test_only_one_unrequested_upload_is_kept(opening: Opening) -> None:
    async with opening() as broker:
        request = make_request((await broker.subscribe()).id)
        await broker.submit(request)
        for content in (b"first", b"second", b"third"):
            await broker.upload(request.id, request.subscription_id or "", content)
        claimed = await broker.claim()
        assert await broker.uploaded(claimed) == b"first"
        await broker.upload(request.id, request.subscription_id or "", b"asked for")
        assert await broker.uploaded(claimed) == b"asked for"


@on_loop
async def test_an_upload_from_another_session_is_dropped(opening: Opening) -> None:
    async with opening() as broker:
        owner, stranger = (await broker.subscribe()).id, (await broker.subscribe()).id
        request = make_request(owner)
        await broker.submit(request)
        for subscription_id in (stranger, "", "nobody", owner.upper() + "x"):
            await broker.upload(request.id, subscription_id, b"from a stranger")
        await broker.upload(request.id, owner, b"from its owner")
        assert await broker.uploaded(await broker.claim()) == b"from its owner"


@on_loop
async def test_upload_for_polled_job_is_dropped(opening: Opening) -> None:
    async with opening() as broker:
        request = make_request(None)
        await broker.submit(request)
        for subscription_id in ("", "None", (await broker.subscribe()).id):
            await broker.upload(request.id, subscription_id, b"from a stranger")
        waiting = asyncio.create_task(broker.uploaded(await broker.claim()))
        await time_passes_async(SOON_S)
        assert not waiting.done()
        waiting.cancel()


@on_loop
async def test_uploads_of_two_jobs_are_kept_separate(opening: Opening) -> None:
    async with opening() as broker:
        subscription_id = (await broker.subscribe()).id
        first, second = make_request(subscription_id), make_request(subscription_id)
        for request in (first, second):
            await broker.submit(request)
        await broker.upload(second.id, subscription_id, b"for the second")
        await broker.upload(first.id, subscription_id, b"for the first")
        assert await broker.uploaded(first) == b"for the first"
        assert await broker.uploaded(second) == b"for the second"


@on_loop
async def test_upload_for_job_that_is_not_open_is_dropped(opening: Opening) -> None:
    async with opening() as broker:
        subscription_id = (await broker.subscribe()).id
        request = make_request(subscription_id)
        await broker.upload(request.id, subscription_id, b"before it was submitted")
        await broker.submit(request)
        await broker.upload(request.id, subscription_id, b"unread")
        await broker.release(await broker.claim())
        await broker.upload(request.id, subscription_id, b"after it ended")
        # A resubmitted request starts without uploads.
        await broker.submit(request)
        await broker.upload(request.id, subscription_id, b"while it runs")
        assert await broker.uploaded(await broker.claim()) == b"while it runs"


@on_loop
async def test_releasing_twice_has_no_further_effect(opening: Opening) -> None:
    async with opening() as broker:
        request = make_request()
        await broker.submit(request)
        claimed = await broker.claim()
        await broker.release(claimed)
        await broker.release(claimed)
        following = make_request()
        await broker.submit(following)
        assert (await broker.claim()).id == following.id


@on_loop
async def test_publish_returns_whether_client_is_connected(opening: Opening) -> None:
    async with opening() as broker:
        channel = await broker.subscribe()
        for status in (Status.QUEUED, Status.COMPLETED):
            for subscription_id, heard in ((channel.id, True), ("nobody", False), (None, False)):
                request = make_request(subscription_id)
                assert await broker.publish(request, Response(request.id, status)) is heard
        await channel.close()
        request = make_request(channel.id)
        assert not await broker.publish(request, update(request, "too late"))


@on_loop
async def test_request_is_released_with_its_last_response(opening: Opening) -> None:
    async with opening(max_bytes=INLINE) as broker:
        channel = await broker.subscribe()
        live, polled = make_request(channel.id), make_request(None)
        for request in (live, polled):
            await broker.submit(request)
        claimed = [await broker.claim(), await broker.claim()]
        await broker.publish(claimed[0], update(live, "not the last"))
        assert [await broker.is_complete(request) for request in claimed] == [False, False]
        for _ in range(2):  # a repeated last response has no further effect
            await broker.publish(claimed[0], Response(live.id, Status.COMPLETED))
            await broker.complete(claimed[1], Response(polled.id, Status.COMPLETED))
        assert [await broker.is_complete(request) for request in claimed] == [True, True]
        # Neither request counts any more, and neither is claimed again.
        whole = make_request(payload=bytes(INLINE))
        await broker.submit(whole)
        assert (await broker.claim()).id == whole.id


@on_loop
async def test_last_response_deletes_payload_from_object_store(
    redis: RedisServer, tmp_path: Path
) -> None:
    store = FileStore(tmp_path, 3600)
    async with on_redis(redis.url, tmp_path)() as broker:
        channel = await broker.subscribe()
        for subscription_id in (channel.id, None):
            request = make_request(subscription_id, payload=bytes(INLINE + 1))
            await broker.submit(request)
            claimed = await broker.claim()
            assert await store.get(f"requests/{request.id}") == request.payload
            end = Response(request.id, Status.COMPLETED)
            await (broker.publish if subscription_id else broker.complete)(claimed, end)
            await until_gone(store, f"requests/{request.id}")
        assert redis.command("keys", "request:*") == ""
        assert redis.command("get", "queue:bytes") == "0"


@on_loop
async def test_next_leader_runs_no_ended_request(redis: RedisServer, tmp_path: Path) -> None:
    async with on_redis(redis.url, tmp_path)() as broker:
        channel = await broker.subscribe()
        sent = [make_request(subscription_id) for subscription_id in (channel.id, None, channel.id)]
        for request in sent:
            await broker.submit(request)
        live, polled, waiting = [await broker.claim() for _ in sent]
        assert not await broker.is_complete(live)
        await broker.publish(live, Response(live.id, Status.COMPLETED))
        await broker.complete(polled, Response(polled.id, Status.COMPLETED))
    # The leader's process has ended before it learned of either end.
    another = RedisBroker(redis.url, FileStore(tmp_path, 3600), SIGNER, inline_bytes=INLINE)
    await another.start()
    later = make_request()
    await another.submit(later)
    assert [(await another.claim()).id for _ in range(2)] == [waiting.id, later.id]
    assert [await another.is_complete(job) for job in (live, polled, waiting)] == [
        True,
        True,
        False,
    ]
    await another.stop()


@pytest.mark.parametrize("counts", [True, False])
@on_loop
async def test_next_leader_knows_number_of_interrupted_attempts(
    counts: bool, redis: RedisServer, tmp_path: Path
) -> None:
    async with on_redis(redis.url, tmp_path)() as broker:
        sent = [make_request() for _ in range(4)]
        for request in sent:
            await broker.submit(request)
        runs, stopped, ended, _ = [await broker.claim() for _ in sent]
        for request in (runs, stopped, ended):
            broker.note_attempts(request, 1)
        broker.note_attempts(stopped, 0)  # the server was stopped in order
        await broker.complete(ended, Response(ended.id, Status.COMPLETED))
        broker.note_attempts(ended, 2)
    another = RedisBroker(
        redis.url, FileStore(tmp_path, 3600), SIGNER, inline_bytes=INLINE, counts_attempts=counts
    )
    await another.start()
    claimed = [await another.claim() for _ in range(3)]
    assert [job.attempts for job in claimed] == [1 if counts else 0, 0, 0]
    assert not await another.knows(ended.id)
    await another.stop()


@on_loop
async def test_waiting_payloads_are_limited_by_max_queued_bytes(opening: Opening) -> None:
    """This covers payloads within the queue and payloads in the object store."""
    limit = 2 * INLINE
    large, small, last = (
        make_request(payload=bytes(size)) for size in (3 * INLINE, INLINE + 1, INLINE)
    )
    async with opening(max_bytes=limit) as broker:
        await broker.submit(large)  # a single request may have any size
        with pytest.raises(QueueFullError, match="NDIF_MAX_QUEUED_BYTES"):
            await broker.submit(small)
        claimed = await broker.claim()
        assert claimed.id == large.id
        with pytest.raises(QueueFullError, match="have 300kB"):
            await broker.submit(small)
        for _ in range(2):
            await broker.release(claimed)
        await broker.submit(small)
        with pytest.raises(QueueFullError, match=r"have 97\.7KiB"):
            await broker.submit(last)
        await broker.release(await broker.claim())
        await broker.submit(last)
        assert (await broker.claim()).id == last.id


@on_loop
async def test_repeated_submission_is_queued_once(redis: RedisServer, tmp_path: Path) -> None:
    async with on_redis(redis.url, tmp_path)(max_bytes=100) as broker:
        request, other = make_request(payload=bytes(60)), make_request(payload=bytes(60))
        for _ in range(2):
            await broker.submit(request)
        await broker.release(await broker.claim())
        # The request is neither counted twice nor claimed again.
        await broker.submit(other)
        assert (await broker.claim()).id == other.id


@pytest.mark.parametrize("size", [60, INLINE + 1])
@on_loop
async def test_cancelled_submission_leaves_nothing_to_run(
    redis: RedisServer, tmp_path: Path, size: int
) -> None:
    async with on_redis(redis.url, tmp_path)() as broker:
        given_up, claimed = make_request(payload=bytes(size)), make_request(payload=bytes(size))
        await broker.submit(claimed)
        held = await broker.claim()
        redis.pause()
        try:
            # As if the client's connection or its gateway ended; the other request was already claimed.
            submitting = [asyncio.create_task(broker.submit(job)) for job in (given_up, claimed)]
            await time_passes_async(5 * SOON_S)
            await end(submitting)
        finally:
            redis.resume()
        await time_passes_async(10 * SOON_S)
        claims = [held]
        with contextlib.suppress(
            asyncio.TimeoutError
        ):  # a request claimed in between has no payload
            claims.append(await within(broker.claim(), SOON_S))
        for claim in claims:
            with pytest.raises(BrokerError, match="is no longer stored"):
                await broker.payload(claim)
        await eventually(lambda: redis.command("xlen", "queue") == "0")
        await eventually(lambda: redis.command("get", "queue:bytes") == "0")
        await eventually(lambda: not list((tmp_path / "requests").glob("*")))


@on_loop
async def test_full_redis_rejects_requests_and_releases_ended_ones(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with on_redis(redis.url, tmp_path)() as broker:
        channel = await broker.subscribe()
        request = make_request(channel.id)
        await broker.submit(request)
        claimed = await broker.claim()
        redis.command("config", "set", "maxmemory", "1")
        try:
            with pytest.raises(BrokerError, match="maxmemory"):
                await broker.submit(make_request())
            response = Response(request.id, Status.COMPLETED)
            assert await broker.publish(claimed, response)
            assert frames.read(await channel.next()) == response
            await within(broker.complete(claimed, response), PATIENCE_S)
            with pytest.raises(BrokerError, match="is no longer stored"):
                await broker.payload(claimed)
        finally:
            redis.command("config", "set", "maxmemory", "0")
        following = make_request()
        await broker.submit(following)
        assert (await broker.claim()).id == following.id


@pytest.mark.parametrize("with_an_end", [True, False])
@on_loop
async def test_release_during_redis_outage_takes_effect_after_restart(
    redis: RedisServer, tmp_path: Path, with_an_end: bool
) -> None:
    async with on_redis(redis.url, tmp_path)() as broker:
        request = make_request()
        await broker.submit(request)
        claimed = await broker.claim()
        redis.kill()
        end = Response(request.id, Status.COMPLETED)
        coming = broker.complete(claimed, end) if with_an_end else broker.release(claimed)
        letting_go = asyncio.create_task(coming)
        await time_passes_async(SOON_S)
        assert not letting_go.done()
        redis.start()
        await within(letting_go, PATIENCE_S)
        assert await broker.is_complete(claimed) is with_an_end
        with pytest.raises(BrokerError, match="is no longer stored"):
            await broker.payload(claimed)
        assert redis.command("xlen", "queue") == "0"


@on_loop
async def test_unencodable_command_fails_only_its_caller(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with on_redis(redis.url, tmp_path)() as broker:
        asked = [broker.disconnected(["nobody"]) for _ in range(50)]
        outcomes = await asyncio.gather(*asked, broker.client.get("\ud800"), return_exceptions=True)
        assert outcomes[:50] == [{"nobody"}] * 50
        assert isinstance(outcomes[50], UnicodeEncodeError)


@on_loop
async def test_command_pending_at_close_fails(redis: RedisServer, tmp_path: Path) -> None:
    async with on_redis(redis.url, tmp_path)() as broker:
        asking = asyncio.create_task(broker.client.ping())
        await asyncio.sleep(0)
        await broker.client.aclose()
        with pytest.raises((BrokerError, asyncio.CancelledError)):
            await within(asking, PATIENCE_S)
