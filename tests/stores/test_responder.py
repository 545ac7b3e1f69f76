"""Updates of polled jobs while the object store is unavailable, and updates of short live jobs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection
from pathlib import Path

import pytest

from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore, ObjectStoreError
from ndif.stores.responder import DEFERRABLE, Responder, last_response
from ndif.tasks import within
from tests.on_loop import on_loop, on_virtual_loop
from tests.waiting import virtual_time_passes as elapse

MODEL = ModelKey("a.B", "org/name")


class FlakyStore(FileStore):
    """A store that can be unavailable."""

    away = False

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        if self.away:
            raise ObjectStoreError("the object store at http://10.0.0.1 cannot be reached: gone")
        await super().put(key, content)


def a_request() -> Request:
    return Request(MODEL, "0.8", Wire.ENVELOPE, b"", False, "http://here")


@on_loop
async def test_intermediate_update_that_cannot_be_stored_is_skipped(tmp_path: Path) -> None:
    store, request = FlakyStore(tmp_path, 60), a_request()
    responder = Responder(MemoryBroker(), store)
    for status, away in (
        (Status.RECEIVED, False),
        (Status.QUEUED, True),
        (Status.RUNNING, True),
        (Status.COMPLETED, False),
    ):
        store.away = away
        await responder.respond(request, Response(request.id, status))
    kept = await last_response(store, request.id)
    assert kept is not None
    assert kept.status is Status.COMPLETED


@on_loop
async def test_late_update_does_not_hide_end(tmp_path: Path) -> None:
    """A leader that unknowingly lost a job reports it as queued after its end."""
    store, request = FileStore(tmp_path, 60), a_request()
    knows, knows_not = (Responder(MemoryBroker(), store) for _ in range(2))
    await knows.respond(request, Response(request.id, Status.COMPLETED))
    await knows_not.respond(request, Response(request.id, Status.QUEUED))
    await knows_not.ensure_end(request, Response(request.id, Status.ERROR, "Lost."))
    kept = await last_response(store, request.id)
    assert kept is not None
    assert kept.status is Status.COMPLETED


@pytest.mark.parametrize("status", [Status.RECEIVED, Status.COMPLETED, Status.ERROR])
@on_loop
async def test_first_and_last_response_fail_if_store_is_unavailable(
    tmp_path: Path, status: Status
) -> None:
    store, request = FlakyStore(tmp_path, 60), a_request()
    store.away = True
    with pytest.raises(ObjectStoreError, match="cannot be reached"):
        await Responder(MemoryBroker(), store).respond(request, Response(request.id, status))


class Client:
    """A live client that receives its job's updates."""

    def __init__(self, broker: MemoryBroker, callback: str = "") -> None:
        self._broker = broker
        self.request = Request(
            MODEL,
            "0.8",
            Wire.ENVELOPE,
            b"",
            False,
            "http://here",
            subscription_id="a-client",
            callback=callback,
        )

    async def hears(self, responder: Responder, *statuses: Status, for_s: float = 0.0) -> list[str]:
        """Send statuses, wait `for_s` seconds, and return the statuses that arrived."""
        channel = await self._broker.subscribe("a-client")
        for status in statuses:
            await responder.respond(self.request, Response(self.request.id, status))
        await elapse(for_s)
        heard = []
        with contextlib.suppress(asyncio.TimeoutError):
            while True:
                heard.append(json.loads(await within(channel.next(), 0.01))["status"])
        return heard


QUEUED, DISPATCHED, RUNNING = DEFERRABLE
LATER_S = 0.2


@on_virtual_loop
async def test_quick_job_reports_only_its_end(tmp_path: Path) -> None:
    broker = MemoryBroker()
    responder = Responder(broker, FileStore(tmp_path, 60), deferred=DEFERRABLE)
    all_of_it = (*DEFERRABLE, Status.COMPLETED)
    client = Client(broker)
    assert await client.hears(responder, *all_of_it, for_s=LATER_S) == ["COMPLETED"]


@on_virtual_loop
async def test_longer_job_reports_latest_deferred_status(tmp_path: Path) -> None:
    broker = MemoryBroker()
    responder = Responder(broker, FileStore(tmp_path, 60), deferred=DEFERRABLE)
    client = Client(broker)
    assert await client.hears(responder, QUEUED, DISPATCHED) == []
    assert await client.hears(responder, for_s=LATER_S) == ["DISPATCHED"]
    assert await client.hears(responder, QUEUED, RUNNING, for_s=LATER_S) == ["RUNNING"]
    assert await client.hears(responder, QUEUED, Status.COMPLETED) == ["COMPLETED"]


@on_virtual_loop
async def test_frequent_statuses_do_not_delay_each_other_forever(tmp_path: Path) -> None:
    """A job whose queue position changes constantly still gets updates."""
    broker = MemoryBroker()
    responder = Responder(broker, FileStore(tmp_path, 60), deferred=DEFERRABLE)
    client, count = Client(broker), 0
    for _ in range(12):
        count += len(await client.hears(responder, QUEUED, for_s=0.03))
    assert 2 <= count <= 5


@pytest.mark.parametrize(
    ("deferred", "callback"), [((), ""), (DEFERRABLE, "every+https://example.org/told")]
)
@on_virtual_loop
async def test_status_is_sent_at_once_without_deferral(
    tmp_path: Path, deferred: Collection[Status], callback: str
) -> None:
    broker = MemoryBroker()
    responder = Responder(broker, FileStore(tmp_path, 60), deferred=deferred)
    client = Client(broker, callback)
    assert await client.hears(responder, QUEUED, RUNNING) == ["QUEUED", "RUNNING"]


@on_virtual_loop
async def test_log_comes_after_deferred_status(tmp_path: Path) -> None:
    broker = MemoryBroker()
    responder = Responder(broker, FileStore(tmp_path, 60), deferred=DEFERRABLE)
    heard = await Client(broker).hears(responder, QUEUED, RUNNING, Status.LOG, Status.LOG)
    assert heard == ["RUNNING", "LOG", "LOG"]


@on_virtual_loop
async def test_outdated_deferred_status_is_not_sent(tmp_path: Path) -> None:
    broker, is_over = MemoryBroker(), False
    responder = Responder(broker, FileStore(tmp_path, 60), deferred=DEFERRABLE)
    client = Client(broker)
    await client.hears(responder)
    response = Response(client.request.id, RUNNING)
    assert await responder.respond(client.request, response, unless=lambda: is_over)
    is_over = True
    assert await client.hears(responder, for_s=LATER_S) == []


@on_virtual_loop
async def test_deferred_status_reports_absent_client_at_once(tmp_path: Path) -> None:
    broker = MemoryBroker()
    responder = Responder(broker, FileStore(tmp_path, 60), deferred=DEFERRABLE)
    request = Client(broker).request
    assert not await responder.respond(request, Response(request.id, DISPATCHED))
    await broker.subscribe("a-client")
    assert await responder.respond(request, Response(request.id, DISPATCHED))
