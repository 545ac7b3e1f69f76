"""Requests that arrive before a dispatcher can run them."""

from __future__ import annotations

from pathlib import Path

from ndif.queue.dispatcher import HoldingQueue
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.status import Status
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore
from ndif.stores.responder import Responder
from tests import frames
from tests.on_loop import on_loop

MODEL = ModelKey("a.B", "org/name")
TEXT = "It waits."


def a_request(subscription_id: str) -> Request:
    return Request(
        MODEL, "0.8", Wire.ENVELOPE, b"", False, "http://here", subscription_id=subscription_id
    )


@on_loop
async def test_holding_queue_notifies_clients_and_keeps_every_request(tmp_path: Path) -> None:
    broker = MemoryBroker()
    room = HoldingQueue(broker, Responder(broker, FileStore(tmp_path, 60)), TEXT)
    client = await broker.subscribe()
    sent = [a_request(client.id) for _ in range(3)]
    for request in sent:
        await broker.submit(request)
    room.open()
    room.open()
    for request in sent:
        update = frames.read(await client.next())
        assert (update.id, update.status, update.description) == (request.id, Status.QUEUED, TEXT)
    # A departed client gets no update; its request is kept like the others.
    departed = a_request("gone")
    await broker.submit(departed)
    last = a_request(client.id)
    await broker.submit(last)
    assert frames.read(await client.next()).id == last.id
    waited = await room.close()
    assert [request.id for request in waited] == [entry.id for entry in (*sent, departed, last)]
    # After closing, other consumers claim requests.
    await broker.submit(later := a_request(client.id))
    assert (await broker.claim()).id == later.id


@on_loop
async def test_unopened_holding_queue_claims_no_request(tmp_path: Path) -> None:
    broker = MemoryBroker()
    room = HoldingQueue(broker, Responder(broker, FileStore(tmp_path, 60)), TEXT)
    await broker.submit(a_request("me"))
    assert await room.close() == []
