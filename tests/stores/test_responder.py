"""Updates of a polled job while the object store is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore, ObjectStoreError
from ndif.stores.responder import Responder, last_response
from tests.on_loop import on_loop

MODEL = ModelKey("a.B", "org/name")


class FlakyStore(FileStore):
    """A store that can be away."""

    away = False

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        if self.away:
            raise ObjectStoreError("the object store at http://10.0.0.1 cannot be reached: gone")
        await super().put(key, content)


def a_request() -> Request:
    return Request(MODEL, "0.8", Wire.ENVELOPE, b"", False, "http://here")


@on_loop
async def test_an_update_that_cannot_be_kept_costs_nothing_but_itself(tmp_path: Path) -> None:
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
async def test_a_late_update_hides_no_end(tmp_path: Path) -> None:
    """A leader that has lost a job without knowing it says that the job waits, after it has ended."""
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
async def test_the_first_and_the_last_are_not_lost_in_silence(
    tmp_path: Path, status: Status
) -> None:
    store, request = FlakyStore(tmp_path, 60), a_request()
    store.away = True
    with pytest.raises(ObjectStoreError, match="cannot be reached"):
        await Responder(MemoryBroker(), store).respond(request, Response(request.id, status))
