"""Delivery of webhooks and mail over real connections: at least once, with retries and a last attempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from ndif.config.settings import Settings
from ndif.delivery.loop import Policy
from ndif.queue.callbacks.delivery import CallbackDelivery, open_delivery
from ndif.queue.callbacks.guard import EVERYWHERE, CallbackRules, Network
from ndif.queue.callbacks.webhook import Webhooks
from ndif.schema.callback import callback_for
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import MemoryBroker
from ndif.stores.callbacks import CallbackLimits, SqliteCallbacks
from ndif.stores.objects import FileStore, ObjectStoreError
from ndif.stores.objects.port import end_key
from ndif.stores.responder import Responder
from ndif.tasks import end
from tests.on_loop import on_loop
from tests.queue.callbacks.receiver import receiving
from tests.waiting import PATIENCE_S, eventually

QUICK = Policy(max_attempts=3, first_s=0.01, factor=1.0)


class Mailbox:
    """A mailer that keeps its messages."""

    sender = "ndif@example.org"

    def __init__(self) -> None:
        self.sent: list[EmailMessage] = []

    async def send(self, message: EmailMessage) -> None:
        self.sent.append(message)


class Server:
    """The parts of a server that end a job and deliver webhooks and mail."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.objects = FileStore(folder / "objects", 3600)
        self.queue = SqliteCallbacks(folder / "callbacks")
        self.responder = Responder(MemoryBroker(), self.objects, self.queue)
        self.mailbox = Mailbox()
        allowed: Sequence[Network] = options.pop("allowed", EVERYWHERE)
        policy = options.pop("policy", QUICK)
        mailer = self.mailbox if options.pop("sends_mail", True) else None
        self.hooks = Webhooks(allowed, ["the server's secret"], PATIENCE_S, lambda: 1.0)
        self.delivery = CallbackDelivery(
            self.queue, self.objects, self.hooks, mailer, allowed, policy, **options
        )

    async def end(self, callback: str, status: Status = Status.COMPLETED, **fields: Any) -> Request:
        """End a polled job."""
        request = a_request(callback, **fields)
        await self.responder.respond(request, Response(request.id, status, "It ended."))
        return request

    async def idle(self) -> bool:
        """Return True if no delivery waits."""
        waiting, _ = await self.queue.counts()
        return waiting == 0

    async def until_put_off(self, request: Request) -> None:
        """Wait until the webhook of a request is postponed."""

        async def is_put_off() -> bool:
            (waiting,) = await self.queue.find(request.id)
            return waiting.due > waiting.created

        await eventually(is_put_off)


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[Server]:
    server = Server(folder, **options)
    task = asyncio.create_task(server.delivery.run())
    try:
        yield server
    finally:
        await end([task])
        server.delivery.close()
        await server.queue.stop()


def a_request(callback: str, **fields: Any) -> Request:
    model = ModelKey("a.B", "org/name")
    return Request(
        model, "0.7", Wire.HEADERS, b"", False, "http://here", callback=callback, **fields
    )


def path_of(target: str) -> str:
    return target.partition("?")[0]


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.ERROR])
@on_loop
async def test_webhook_is_called_when_job_ends(tmp_path: Path, status: Status) -> None:
    async with receiving() as receiver, running(tmp_path) as server:
        request = await server.end(f"{receiver.url}/done", status)
        await eventually(server.idle)
    assert [delivery.target for delivery in receiver.asked] == [
        f"/done?status={status.value}&id={request.id}"
    ]


@on_loop
async def test_webhook_is_called_only_for_end_and_only_if_requested(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path) as server:
        request = a_request(receiver.url)
        for status in (Status.RECEIVED, Status.QUEUED, Status.RUNNING, Status.LOG):
            await server.responder.respond(request, Response(request.id, status))
        await server.end("")
        assert await server.queue.counts() == (0, 0)
        await server.end(receiver.url)
        await eventually(lambda: receiver.asked)
        await eventually(server.idle)
    assert len(receiver.asked) == 1


@on_loop
async def test_every_status_webhook_is_called_once_per_status(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path) as server:
        request = a_request(f"every+post+{receiver.url}")
        respond, bodies = server.responder.respond, []
        for status in (
            *(Status.RECEIVED, Status.QUEUED, Status.QUEUED, Status.LOG, Status.RUNNING),
            *(Status.STREAM, Status.RUNNING, Status.QUEUED, Status.RUNNING, Status.COMPLETED),
        ):
            await respond(request, Response(request.id, status, "A description."))
            await eventually(server.idle)
        bodies = [json.loads(delivery.body) for delivery in receiver.asked]
        # It ran twice.
        statuses = ["QUEUED", "RUNNING", "QUEUED", "RUNNING", "COMPLETED"]
        assert [body["status"] for body in bodies] == statuses
        assert {body["id"] for body in bodies} == {request.id}
        assert [("ended" in body["times"]) for body in bodies] == [False] * 4 + [True]
        message_ids = [delivery.headers["webhook-id"] for delivery in receiver.asked]
        assert message_ids[-1] == f"msg_{request.id}"
        assert message_ids[1] == f"msg_{request.id}_RUNNING"
        assert server.responder._notified == {}


@on_loop
async def test_memory_of_reported_statuses_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndif.stores.responder._MAX_NOTIFIED", 2)
    server = Server(tmp_path)
    for _ in range(5):
        request = a_request("every+https://example.org/")
        await server.responder.respond(request, Response(request.id, Status.QUEUED))
    assert len(server.responder._notified) == 2
    await server.queue.stop()


@on_loop
async def test_failed_status_webhook_does_not_affect_end(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path) as server:
        receiver.status = 500
        request = a_request(f"every+{receiver.url}")
        await server.responder.respond(request, Response(request.id, Status.RUNNING))
        await eventually(server.idle)
        receiver.status = 200
        await server.responder.respond(request, Response(request.id, Status.ERROR))
        await eventually(server.idle)
        (dead,) = await server.queue.all(10)
        assert dead.content.status == "RUNNING"
        assert await server.delivery.retry(request.id[:8]) == [request.id]
        await eventually(server.idle)
        assert await server.queue.counts() == (0, 0)
    last = [delivery.target for delivery in receiver.asked][-2:]
    assert last == [f"/?status={status}&id={request.id}" for status in ("ERROR", "RUNNING")]


@on_loop
async def test_webhook_is_called_for_job_with_live_client(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path) as server:
        request = await server.end(receiver.url, subscription_id="somebody")
        await eventually(lambda: receiver.asked)
        assert await server.objects.get(end_key(request.id)) is None


@on_loop
async def test_webhook_waits_until_end_is_stored(tmp_path: Path) -> None:
    """A process dies after it has queued the webhook, and before it has stored the end."""
    async with receiving() as receiver, running(tmp_path) as server:
        request = a_request(receiver.url)
        response = Response(request.id, Status.ERROR, "At its first run.")
        await server.queue.add(callback_for(request, response, server.delivery._now()))
        await server.end(receiver.url)
        await eventually(lambda: receiver.asked)
        await server.until_put_off(request)
        assert len(receiver.asked) == 1
        # The job is rerun and ends differently.
        await server.responder.respond(request, Response(request.id, Status.COMPLETED))
        await eventually(server.idle)
    assert receiver.asked[1].target == f"/?status=COMPLETED&id={request.id}"


@on_loop
async def test_webhook_is_given_up_if_end_is_never_stored(tmp_path: Path) -> None:
    clock = [1000.0]
    async with running(tmp_path, now=lambda: clock[0]) as server:
        request = a_request("http://example.org/")
        await server.queue.add(callback_for(request, Response(request.id, Status.ERROR), 1000.0))
        await server.until_put_off(request)
        assert await server.queue.counts() == (1, 0)
        clock[0] = 2000.0
        await server.queue.add(callback_for(request, Response(request.id, Status.ERROR), 1000.0))
        await eventually(server.idle)
        (dead,) = await server.queue.all(10)
        assert (dead.dead, dead.problem) == (True, "the end of its job is not stored")


@on_loop
async def test_end_is_stored_although_webhook_cannot_be_queued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path)
    server.queue._limits = CallbackLimits(waiting=0)
    request = await server.end("https://example.org/private")
    assert await server.objects.get(end_key(request.id)) is not None
    assert "its webhook or mail is not queued: 0 webhooks and mails wait already" in caplog.text
    assert "example.org" not in caplog.text
    await server.queue.stop()


# Failures


@on_loop
async def test_failed_webhook_is_retried_until_it_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with receiving() as receiver, running(tmp_path) as server:
        receiver.first, receiver.status = [503, 503], 200
        request = await server.end(f"post+{receiver.url}/secret-path")
        await eventually(server.idle)
    assert len(receiver.asked) == 3
    assert len({delivery.headers["webhook-id"] for delivery in receiver.asked}) == 1
    assert (
        f"request {request.id}: attempt 2 of its webhook or mail failed: it answered 503"
        in caplog.text
    )
    assert f"request {request.id}: its webhook or mail is delivered" in caplog.text
    assert "secret-path" not in caplog.text
    assert "localhost" not in caplog.text


@on_loop
async def test_operator_can_retry_webhook_after_last_attempt(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path) as server:
        receiver.status = 500
        request = await server.end(f"{receiver.url}/x?token=secret")
        await eventually(server.idle)
        assert len(receiver.asked) == QUICK.max_attempts
        described = await server.delivery.describe()
        assert (described.waiting, described.given_up) == (0, 1)
        (row,) = described.callbacks
        assert row.request_id == request.id
        assert row.to == f"http://localhost:{receiver.port}/…"
        assert (row.state, row.attempts, row.problem) == ("given up", 3, "it answered 500")
        receiver.status = 204
        assert await server.delivery.retry(None) == [request.id]
        await eventually(lambda: len(receiver.asked) == QUICK.max_attempts + 1)
        await eventually(server.idle)
        assert await server.queue.counts() == (0, 0)


@on_loop
async def test_forbidden_webhook_address_is_given_up_immediately(tmp_path: Path) -> None:
    """Such a job may come from an older server, or from one that allowed more."""
    async with receiving() as receiver, running(tmp_path, allowed=()) as server:
        await server.end(f"http://127.0.0.1:{receiver.port}/")
        await server.end("gopher://x/")
        await eventually(server.idle)
        dead = await server.queue.all(10)
    assert {(entry.attempts, entry.problem) for entry in dead} == {
        (1, "this server does not call its address")
    }
    assert receiver.asked == []


class AwayStore(FileStore):
    """A store that cannot be read."""

    async def get(self, key: str) -> bytes | None:
        raise ObjectStoreError("it is away")


@on_loop
async def test_webhook_waits_while_store_is_unavailable(tmp_path: Path) -> None:
    async with receiving() as receiver, running(tmp_path) as server:
        server.delivery._objects = AwayStore(tmp_path / "objects", 3600)
        await server.until_put_off(await server.end(receiver.url))
        assert receiver.asked == []
        server.delivery._objects = server.objects
        await eventually(lambda: receiver.asked)


@on_loop
async def test_server_error_costs_one_webhook_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving() as receiver, running(tmp_path) as server:
        send, failures = server.hooks.send, [ZeroDivisionError()]

        async def fail(*arguments: Any) -> None:
            if failures:
                raise failures.pop()
            await send(*arguments)

        monkeypatch.setattr(server.hooks, "send", fail)
        await server.end(receiver.url)
        await eventually(server.idle)
        assert len(receiver.asked) == 1


# Many


@on_loop
async def test_host_gets_two_concurrent_webhooks_and_delays_no_other_host(tmp_path: Path) -> None:
    async with receiving() as slow, receiving() as quick, running(tmp_path) as server:
        slow.release.clear()
        for _ in range(20):
            await server.end(f"http://localhost:{slow.port}/")
        await eventually(lambda: slow.at_once == 2)
        # Hosts are told apart by name, not by port.
        await server.end(f"http://127.0.0.1:{quick.port}/")
        await eventually(lambda: quick.asked)
        assert slow.at_once == 2
        slow.release.set()
        await eventually(server.idle)
        assert (len(slow.asked), slow.most_at_once) == (20, 2)


@on_loop
async def test_interrupted_webhook_is_repeated_by_next_process(tmp_path: Path) -> None:
    async with receiving() as receiver:
        receiver.release.clear()
        async with running(tmp_path) as server:
            request = await server.end(receiver.url)
            await eventually(lambda: receiver.asked)
        receiver.release.set()
        async with running(tmp_path) as server:
            await eventually(server.idle)
    assert [delivery.target for delivery in receiver.asked] == [
        f"/?status=COMPLETED&id={request.id}"
    ] * 2


# Mail


@on_loop
async def test_mail_reports_end_without_text_of_user_code(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        request = a_request("ada@example.org", received=1000.0)
        end_ = Response(request.id, Status.ERROR, "Buy this: http://evil.example")
        await server.responder.respond(request, end_)
        await eventually(lambda: server.mailbox.sent)
    (message,) = server.mailbox.sent
    assert (message["To"], message["From"]) == ("ada@example.org", "ndif@example.org")
    assert message["Subject"] == f"NDIF job {request.id[:8]}: ERROR"
    assert message["Message-ID"] == f"<{request.id}@example.org>"
    assert message["Auto-Submitted"] == "auto-generated"
    text = message.get_content()
    assert f"http://here/response/{request.id}" in text
    assert "org/name" in text
    assert "Thu, 01 Jan 1970 00:16:40 GMT" in text
    assert "evil" not in message.as_string()


@on_loop
async def test_mail_is_given_up_if_server_no_longer_sends_mail(tmp_path: Path) -> None:
    async with running(tmp_path, sends_mail=False) as server:
        await server.end("ada@example.org")
        await eventually(server.idle)
        described = await server.delivery.describe()
    (row,) = described.callbacks
    assert (row.to, row.problem) == ("a…@example.org", "this server sends no mail any more")


@on_loop
async def test_settings_limit_webhook_attempts_and_timeout(tmp_path: Path) -> None:
    settings = Settings(callback_attempts=1, callback_timeout_s=0.2)
    queue, objects = SqliteCallbacks(tmp_path), FileStore(tmp_path, 60)
    delivery = open_delivery(
        settings, queue, objects, CallbackRules(EVERYWHERE, ["the server's secret"])
    )
    async with receiving() as receiver:
        receiver.status = 0
        end_ = Response("id", Status.ERROR)
        await queue.add(callback_for(a_request(receiver.url, subscription_id="s"), end_, 0.0))
        task = asyncio.create_task(delivery.run())

        async def is_given_up() -> bool:
            return (await queue.counts())[1] == 1

        await eventually(is_given_up)
    (dead,) = await queue.all(1)
    assert (dead.attempts, dead.problem) == (1, "it did not answer within 0.2s")
    await end([task])
    delivery.close()
    await queue.stop()
