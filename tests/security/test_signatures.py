"""Attacks with full access to Redis but without a secret of the server.

Each test is an attack and its outcome. The server's side is real: gateways, leaders and replicas with
separate brokers on a real Redis. Such an attacker can delete, delay and repeat messages, and so stop a
server; these tests do not cover that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndif.host.execution import announcement
from ndif.queue.lifecycle import QueueLifecycle
from ndif.schema.deployment import OperationError
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores import leader as leader_module
from ndif.stores.broker import BrokerError
from ndif.stores.broker.encoding import encode_end, encode_request, encode_update
from ndif.stores.broker.redis import broker as broker_module
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.redis.job_channels import JobReceiver, JobSender
from ndif.stores.broker.signing import Signer, unverified
from ndif.stores.leader import LeaderLock, LeaderRpc, SharedCache
from ndif.stores.objects import FileStore
from ndif.stores.objects.port import end_key
from ndif.stores.redis import Redis, connect
from ndif.stores.responder import Responder, last_response
from ndif.tasks import end, within
from tests import frames
from tests.on_loop import on_loop
from tests.security.monitor import monitoring
from tests.services.redis import RedisServer
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytestmark = pytest.mark.engine

SECRET = "a secret that Redis never holds"
INLINE = 1000
SOON_S = 0.2
MODEL = ModelKey("a.B", "org/name")
HEAD = len(Signer([SECRET]).sign("", b""))
"""Bytes before the content of a signed message."""


class World:
    """A server's processes around one Redis, and an attacker who writes there."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.gateway = self.broker()
        self.leader = self.broker()
        self.attacker: Redis = connect(url)
        self._brokers = [self.gateway, self.leader]

    def broker(self, *secrets: str) -> RedisBroker:
        objects = FileStore(self.folder, 3600)
        return RedisBroker(self.url, objects, Signer(secrets or [SECRET]), inline_bytes=INLINE)

    async def start(self) -> None:
        await self.attacker.flushall()
        for broker in self._brokers:
            await broker.start()

    async def stop(self) -> None:
        for broker in self._brokers:
            await broker.stop()
        await self.attacker.flushall()  # tests share this Redis
        await self.attacker.aclose()

    async def another(self, *secrets: str) -> RedisBroker:
        """Start another process: a replica, or the next leader."""
        broker = self.broker(*secrets)
        self._brokers.append(broker)
        await broker.start()
        return broker

    async def sent(self, *, subscription_id: str | None = None, **fields: Any) -> Request:
        """Return a request that a gateway has accepted."""
        request = a_request(subscription_id=subscription_id, **fields)
        if subscription_id is None:
            received = Response(request.id, Status.RECEIVED)
            await Responder(self.gateway, FileStore(self.folder, 3600)).respond(request, received)
        await self.gateway.submit(request)
        return request

    async def entry(self) -> bytes:
        """Return the newest raw entry of the queue."""
        ((_, fields),) = await self.attacker.xrevrange("queue", count=1)
        return bytes(fields[b"request"])

    async def put(self, content: bytes) -> None:
        await self.attacker.xadd("queue", {"request": content})

    async def claims_nothing(self, broker: RedisBroker, *, left: int) -> None:
        """Let a broker claim until `left` entries remain in the queue; check that the claim got none."""

        async def are_left() -> bool:
            return bool(await self.attacker.xlen("queue") == left)

        claiming = asyncio.create_task(broker.claim())
        await eventually(are_left)
        await time_passes_async(SOON_S)
        assert not claiming.done()
        await end([claiming])


def a_request(**fields: Any) -> Request:
    values = {"payload": b"opaque", "trusted": True, **fields}
    return Request(MODEL, "0.8", Wire.ENVELOPE, compress=False, base_url="http://here", **values)


def altered(message: bytes, before: bytes, after: bytes) -> bytes:
    """Return the message with its old signature and other content of the same length."""
    assert message.count(before) == 1
    assert len(before) == len(after)
    return message.replace(before, after)


@contextlib.asynccontextmanager
async def a_world(redis: RedisServer, folder: Path) -> AsyncIterator[World]:
    world = World(redis.url, folder)
    await world.start()
    try:
        yield world
    finally:
        await world.stop()


# Jobs in the queue: each ends as an ERROR for its owner, and none of its fields is trusted


async def a_job_of_ones_own(world: World) -> None:
    await world.put(encode_request(a_request(user="root", key="ab12")))


async def a_job_with_another_secret(world: World) -> None:
    await world.put(Signer(["of another server"]).sign("queue", encode_request(a_request())))


async def a_job_made_trusted(world: World) -> None:
    await world.sent(trusted=False)
    entry = await world.entry()
    await world.attacker.delete("queue")
    await world.leader.start()
    await world.put(altered(entry, b'"trusted":false', b'"trusted":true '))


async def a_job_moved_to_another_model(world: World) -> None:
    await world.sent()
    entry = await world.entry()
    await world.attacker.delete("queue")
    await world.leader.start()
    await world.put(altered(entry, b"org/name", b"org/nama"))


async def a_job_of_another_place(world: World) -> None:
    content = encode_request(a_request())
    await world.put(world.gateway.signer.sign("subscription:somebody", content))


@pytest.mark.parametrize(
    "attack",
    [
        a_job_of_ones_own,
        a_job_with_another_secret,
        a_job_made_trusted,
        a_job_moved_to_another_model,
        a_job_of_another_place,
    ],
)
@on_loop
async def test_job_without_gateway_signature_is_refused(
    redis: RedisServer, tmp_path: Path, attack: Callable[[World], Awaitable[None]]
) -> None:
    async with a_world(redis, tmp_path) as world:
        await attack(world)
        claimed = await within(world.leader.claim(), PATIENCE_S)
        assert "without the signature" in claimed.refusal
        believed = (claimed.trusted, claimed.user, claimed.key, claimed.callback, claimed.payload)
        assert believed == (False, "", "", "", b"")


@on_loop
async def test_job_of_other_version_is_refused(redis: RedisServer, tmp_path: Path) -> None:
    async with a_world(redis, tmp_path) as world:
        request = a_request()
        record = {**json.loads(encode_request(request)), "of_another_version": 1}
        await world.put(world.gateway.signer.sign("queue", json.dumps(record).encode()))
        claimed = await within(world.leader.claim(), PATIENCE_S)
        assert claimed.id == request.id
        assert claimed.refusal.endswith("cannot read it. Send it again.")
        assert not claimed.trusted


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"\0" * 100, b'{"id": 1}', b'{"id": "../../x"}', b"[]"]
)
@on_loop
async def test_malformed_queue_entry_is_dropped(
    redis: RedisServer, tmp_path: Path, content: bytes, signed: bool
) -> None:
    async with a_world(redis, tmp_path) as world:
        honest = await world.sent(trusted=False)
        await world.put(world.gateway.signer.sign("queue", content) if signed else content)
        await world.put(await world.entry() + b"more after the signature")
        claimed = await within(world.leader.claim(), PATIENCE_S)
        assert (claimed.id, claimed.refusal) == (honest.id, "")
        while await world.attacker.xlen("queue") != 1:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("had_ended", [True, False])
@on_loop
async def test_refused_job_reports_reason_and_keeps_existing_end(
    redis: RedisServer, tmp_path: Path, had_ended: bool
) -> None:
    async with a_world(redis, tmp_path) as world:
        objects = FileStore(tmp_path, 3600)
        responder = Responder(world.leader, objects)
        forged = a_request(callback="http://127.0.0.1:1/would-be-asked")
        if had_ended:
            await objects.put(end_key(forged.id), b'{"status": "COMPLETED"}')
        await world.put(encode_request(forged))
        claimed = await within(world.leader.claim(), PATIENCE_S)
        lifecycle = QueueLifecycle(world.leader, responder)
        job = lifecycle.claim(claimed)
        assert job is not None
        await lifecycle.fail(job, claimed.refusal)
        response = await last_response(objects, forged.id)
        assert response is not None
        assert response.status is (Status.COMPLETED if had_ended else Status.ERROR)
        assert had_ended or "Send it again" in response.fields["description"]
        while await world.attacker.xlen("queue"):  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.01)


# Payloads


@pytest.mark.parametrize("size", [10, INLINE + 1])
@on_loop
async def test_changed_payload_is_refused_or_ignored(
    redis: RedisServer, tmp_path: Path, size: int
) -> None:
    """A changed payload in Redis is refused; one beside a payload in the object store is ignored."""
    async with a_world(redis, tmp_path) as world:
        request = await world.sent(payload=bytes(size))
        await world.attacker.hset(f"request:{request.id}", "payload", b"the attacker's")
        claimed = await within(world.leader.claim(), PATIENCE_S)
        if size > INLINE:
            assert await world.leader.payload(claimed) == bytes(size)
        else:
            with pytest.raises(BrokerError, match="changed in transit"):
                await world.leader.payload(claimed)
        # A replica, to which Redis adds the payload, does not accept it either.
        replica, lanes = await world.another(), JobSender(world.leader)
        lanes.start()
        receiver = await JobReceiver.open(replica, "r", lanes.introduction)
        news = asyncio.get_running_loop().create_future()
        run = asyncio.create_task(lanes.run(claimed, announcement(claimed), "r", news))
        job = await within(receiver.next(), PATIENCE_S)
        assert (job.id, job.payload) == (request.id, b"")
        await end([run])
        await lanes.stop()


# Replayed jobs


@on_loop
async def test_replayed_trusted_job_runs_only_once(redis: RedisServer, tmp_path: Path) -> None:
    async with a_world(redis, tmp_path) as world:
        await world.sent()
        entry = await world.entry()
        claimed = await within(world.leader.claim(), PATIENCE_S)
        await world.put(entry)
        await world.claims_nothing(world.leader, left=1)
        await world.leader.complete(claimed, Response(claimed.id, Status.COMPLETED))
        await world.put(entry)
        await world.claims_nothing(world.leader, left=0)


@pytest.mark.parametrize("polled", [True, False])
@on_loop
async def test_next_leader_does_not_run_replayed_trusted_job(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polled: bool
) -> None:
    monkeypatch.setattr(broker_module, "_POLL_S", SOON_S / 5)
    async with a_world(redis, tmp_path) as world:
        client = await world.gateway.subscribe()
        subscription_id = None if polled else client.id
        await world.sent(subscription_id=subscription_id)
        entry = await world.entry()
        claimed = await within(world.leader.claim(), PATIENCE_S)
        responder = Responder(world.leader, FileStore(tmp_path, 3600))
        await responder.respond(claimed, Response(claimed.id, Status.COMPLETED))
        if not polled:
            await within(client.next(), PATIENCE_S)
        await world.leader.stop()
        await world.attacker.flushall()
        await world.put(entry)
        successor = await world.another()
        if polled:  # its end is stored, so it is forgotten
            await world.claims_nothing(successor, left=0)
        else:
            refused = await within(successor.claim(), PATIENCE_S)
            assert "nothing confirms" in refused.refusal


@pytest.mark.parametrize("polled", [True, False])
@on_loop
async def test_next_leader_runs_every_waiting_trusted_job(
    redis: RedisServer, tmp_path: Path, polled: bool
) -> None:
    async with a_world(redis, tmp_path) as world:
        client = await world.gateway.subscribe()
        jobs = [await world.sent(subscription_id=None if polled else client.id) for _ in range(5)]
        for _ in jobs[1:]:
            await within(world.leader.claim(), PATIENCE_S)
        await world.leader.stop()
        successor = await world.another()
        claimed = [await within(successor.claim(), PATIENCE_S) for _ in jobs]
        assert {request.id for request in claimed} == {request.id for request in jobs}
        assert not any(request.refusal for request in claimed)


# Messages to a replica


@on_loop
async def test_replica_accepts_each_job_once_and_only_from_its_leader(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with a_world(redis, tmp_path) as world:
        replica, other = await world.another(), await world.another()
        lanes = JobSender(world.leader)
        receiver = await JobReceiver.open(replica, "r", lanes.introduction)
        elsewhere = await JobReceiver.open(other, "s", lanes.introduction)
        spy = world.attacker.pubsub()  # type: ignore[no-untyped-call]
        await spy.subscribe("jobs:r")
        await world.sent()
        claimed = await within(world.leader.claim(), PATIENCE_S)
        news = asyncio.get_running_loop().create_future()
        run = asyncio.create_task(lanes.run(claimed, announcement(claimed), "r", news))
        assert (await within(receiver.next(), PATIENCE_S)).trusted
        message = b""
        while not message:
            heard = await spy.get_message(ignore_subscribe_messages=True, timeout=1)
            message = heard["data"] if heard else b""
        forged = message.replace(b'"trusted":true', b'"trusted":null')
        for channel in ("jobs:r", "jobs:s"):
            for sent in (
                message,
                forged,
                unverified(message),
                encode_request(claimed),
                b"",
                b"\0" * 9,
            ):
                await world.attacker.publish(channel, sent)
        # The previous leader's messages are ignored, too, once the replica follows another.
        successor = JobSender(await world.another())
        with pytest.raises(asyncio.TimeoutError):
            await within(receiver.next(), SOON_S)
        receiver.take_from(successor.introduction)
        await world.attacker.publish("jobs:r", message)
        for waiting in (receiver, elsewhere):
            with pytest.raises(asyncio.TimeoutError):
                await within(waiting.next(), SOON_S)
        await end([run])
        await spy.aclose()


# Messages from a replica


@on_loop
async def test_forged_updates_are_not_delivered_to_client(
    redis: RedisServer, tmp_path: Path
) -> None:
    """The client unpickles frames, so a forged frame would run code there."""
    async with a_world(redis, tmp_path) as world:
        first, second = await world.gateway.subscribe(), await world.gateway.subscribe()
        request = await world.sent(subscription_id=first.id)
        made_up = Response(request.id, Status.COMPLETED, "of the attacker's")
        channel = f"subscription:{first.id}"
        update = encode_update(request, made_up)
        signed_elsewhere = world.leader.signer.sign(f"subscription:{second.id}", update)
        for message in (update, Signer(["another's"]).sign(channel, update), signed_elsewhere, b""):
            await world.attacker.publish(channel, message)
            await world.attacker.rpush(f"unconfirmed:{first.id}", message)
        redis.command("client", "kill", "type", "pubsub")  # missed messages are read again
        honest = Response(request.id, Status.LOG, "of the server's")
        while not await world.leader.publish(request, honest):  # noqa: ASYNC110 - it listens again
            await asyncio.sleep(0.01)
        assert frames.read(await within(first.next(), PATIENCE_S)) == honest


@on_loop
async def test_leader_ignores_forged_end(redis: RedisServer, tmp_path: Path) -> None:
    async with a_world(redis, tmp_path) as world:
        lanes, replica = JobSender(world.leader), await world.another()
        lanes.start()
        await JobReceiver.open(replica, "r", lanes.introduction)
        await world.sent()
        claimed = await within(world.leader.claim(), PATIENCE_S)
        news = asyncio.get_running_loop().create_future()
        run = asyncio.create_task(lanes.run(claimed, announcement(claimed), "r", news))
        response = Response(claimed.id, Status.COMPLETED)
        for message in (
            encode_end(response),
            Signer(["another's"]).sign("ends", encode_end(response)),
        ):
            await world.attacker.publish("ends", message)
        await time_passes_async(SOON_S)
        assert not run.done()
        await replica.complete(claimed, response)
        assert (await within(run, PATIENCE_S)) == replace(response, delivered=True)
        await lanes.stop()


@on_loop
async def test_hybrid_job_reads_each_signed_upload_once(redis: RedisServer, tmp_path: Path) -> None:
    async with a_world(redis, tmp_path) as world:
        request = await world.sent(subscription_id="me")
        other = await world.sent(subscription_id="me")
        key = f"uploads:{request.id}"
        await world.gateway.upload(request.id, "me", b"first")
        recorded = await world.attacker.lindex(key, 0)
        await world.gateway.upload(other.id, "me", b"of another job")
        elsewhere = await world.attacker.lindex(f"uploads:{other.id}", 0)
        assert await within(world.leader.uploaded(request), PATIENCE_S) == b"first"
        for message in (b"made up", recorded, elsewhere, Signer(["another's"]).sign(key, b"x")):
            await world.attacker.rpush(key, message)
        reading = asyncio.create_task(world.leader.uploaded(request))
        while await world.attacker.llen(key):  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.01)
        await world.gateway.upload(request.id, "me", b"second")
        assert await within(reading, PATIENCE_S) == b"second"


# Operations


@on_loop
async def test_leader_ignores_forged_and_replayed_operations(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with a_world(redis, tmp_path) as world:
        events: list[str] = []

        async def perform(event: str, arguments: Any) -> bytes:
            events.append(event)
            return b'"done"'

        signer = world.leader.signer
        serving = asyncio.create_task(LeaderRpc(world.leader.client, signer).serve(perform))
        await world.attacker.set("dispatcher:leader", "somebody", px=60_000)
        asks = LeaderRpc(world.gateway.client, signer)
        assert await within(asks.ask("DEPLOY", {}), PATIENCE_S) == b'"done"'
        ((_, recorded),) = await world.attacker.xrevrange("dispatcher:events", count=1)
        event = {"event": "KILL", "id": "0" * 32, "at": time.time(), "arguments": {}}
        before = {**event, "at": str(event["at"]), "arguments": "{}"}
        content = json.dumps(event).encode()
        for entry in (
            recorded,
            before,
            {"event": content},
            {"event": Signer(["another's"]).sign("dispatcher:events", content)},
            {"event": signer.sign("queue", content)},
        ):
            await world.attacker.xadd("dispatcher:events", entry)
        assert await within(asks.ask("EVICT", {}), PATIENCE_S) == b'"done"'
        assert events == ["DEPLOY", "EVICT"]
        # A process with another secret gets an error instead of waiting forever.
        stranger = LeaderRpc(world.gateway.client, Signer(["another's"]))
        with pytest.raises(OperationError, match="another NDIF_CLUSTER_SECRET"):
            await within(stranger.ask("DEPLOY", {}), PATIENCE_S)
        assert events == ["DEPLOY", "EVICT"]
        await end([serving])


@on_loop
async def test_operations_are_answered_despite_clock_differences(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_world(redis, tmp_path) as world:

        async def perform(event: str, arguments: Any) -> bytes:
            return b'"done"'

        async def begun(work: Any, off_s: float) -> asyncio.Task[Any]:
            """Start work whose first step reads another machine's clock."""
            with monkeypatch.context() as patched:
                now = time.time() + off_s
                patched.setattr(leader_module.time, "time", lambda: now)
                task = asyncio.create_task(work)
                await asyncio.sleep(0)
            return task

        await world.attacker.set("dispatcher:leader", "somebody", px=60_000)
        rpc, asks = (LeaderRpc(side.client, side.signer) for side in (world.leader, world.gateway))
        serving = await begun(rpc.serve(perform), 50)
        for off_s in (0, 50, -50):
            asking = await begun(asks.ask("EVICT", {}), off_s)
            assert await within(asking, PATIENCE_S) == b'"done"'
        with pytest.raises(OperationError, match="the clocks of its nodes differ by 500 s"):
            await within(await begun(asks.ask("EVICT", {}), -500), PATIENCE_S)
        await end([serving])


@on_loop
async def test_gateway_rejects_forged_and_expired_cache_entries(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_world(redis, tmp_path) as world:
        signer = world.leader.signer
        writing = SharedCache(world.leader.client, signer)
        await writing.write("models", ["honest"], 60)
        await writing.write("status", {"deployments": {}}, 60)

        async def read(name: str) -> list[str] | None:
            return await SharedCache(world.gateway.client, signer).read(name, list[str])

        assert await read("models") == ["honest"]
        status = await world.attacker.get("status")
        for value in (b'["of the attacker"]', Signer(["another's"]).sign("models", b"[]"), status):
            await world.attacker.set("models", value)
            with pytest.raises(BrokerError, match="another NDIF_CLUSTER_SECRET"):
                await read("models")
        monkeypatch.setattr(leader_module, "_CLOCK_SKEW_S", 0)
        await writing.write("models", ["old"], 60)
        old = await world.attacker.get("models")
        await world.attacker.set("models", old)
        assert await read("models") == ["old"]
        later = time.time() + 61
        monkeypatch.setattr(leader_module.time, "time", lambda: later)
        assert await read("models") is None


# Every write of a process


@on_loop
async def test_every_redis_write_is_signed(redis: RedisServer, tmp_path: Path) -> None:
    with monitoring(redis.port) as monitor:
        async with a_world(redis, tmp_path) as world:
            monitor.commands.clear()
            lanes, replica = JobSender(world.leader), await world.another()
            lanes.start()
            receiver = await JobReceiver.open(replica, "r", lanes.introduction)
            client = await world.gateway.subscribe()
            for subscription_id in (client.id, None):
                request = await world.sent(subscription_id=subscription_id)
                claimed = await within(world.leader.claim(), PATIENCE_S)
                world.leader.note_attempts(claimed, 1)
                news = asyncio.get_running_loop().create_future()
                run = asyncio.create_task(lanes.run(claimed, announcement(claimed), "r", news))
                job = await within(receiver.next(), PATIENCE_S)
                await replica.publish(job, Response(job.id, Status.RUNNING))
                await world.gateway.upload(request.id, subscription_id or "", b"uploaded")
                await receiver.give_back(job)
                assert await within(run, PATIENCE_S) is None
                responder = Responder(replica, FileStore(tmp_path, 3600))
                await responder.respond(job, Response(job.id, Status.COMPLETED))
            for _ in range(3):
                await within(client.next(), PATIENCE_S)
            serving = asyncio.create_task(
                LeaderRpc(world.leader.client, world.leader.signer).serve(_nothing)
            )
            lock = LeaderLock(world.leader.client)
            await lock.taken()
            await LeaderRpc(world.gateway.client, world.gateway.signer).ask("STATUS", {})
            await SharedCache(world.leader.client, world.leader.signer).write("status", {}, 60)
            # The leader asks the gateway about a trusted job whose start it did not see.
            await world.sent(subscription_id=client.id)
            assert not (await within((await world.another()).claim(), PATIENCE_S)).refusal
            await lock.leave()
            await end([serving])
            await lanes.stop()
    kinds = {bytes(name).lower() for name, *_ in monitor.commands}
    assert {b"publish", b"rpush", b"set", b"xadd", b"hset"} <= kinds
    targets = b" ".join(word for _, *words in monitor.commands for word in words[:1])
    for place in (b"jobs:r", b"ends", b"uploads:", b"answer:", b"status", b"confirmations:"):
        assert place in targets
    assert monitor.problems() == []
    assert SECRET.encode() not in b" ".join(b" ".join(words) for words in monitor.commands)


async def _nothing(event: str, arguments: Any) -> bytes:
    return b"null"


# Secrets


@on_loop
async def test_cluster_secret_can_be_replaced_while_server_runs(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with a_world(redis, tmp_path) as world:
        both = await world.another("the next secret", SECRET)
        await world.sent(trusted=False)
        assert not (await within(both.claim(), PATIENCE_S)).refusal
        for _ in range(2):
            await both.submit(a_request(trusted=False))
            assert not (await within(both.claim(), PATIENCE_S)).refusal
        # The other leader, without the new secret, takes over all three jobs.
        claimed = [await within(world.leader.claim(), PATIENCE_S) for _ in range(3)]
        assert [bool(request.refusal) for request in claimed] == [False, True, True]


def test_empty_secret_is_rejected() -> None:
    for secrets in ([], [""], ["a secret", ""]):
        with pytest.raises(ValueError, match="empty secret"):
            Signer(secrets)


def test_signature_separates_place_from_content() -> None:
    signer = Signer([SECRET])
    signed = signer.sign("queue", b"content")
    with pytest.raises(ValueError, match="no signature"):
        signer.verify("queuec", altered(signed, b"content", b"ontentc"))
