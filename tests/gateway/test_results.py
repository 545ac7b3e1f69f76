"""`GET /response/{id}` of known and unknown jobs, and without the store."""

from __future__ import annotations

import uuid
from pathlib import Path

import httpx
from starlette.applications import Starlette

from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.results import ResponseRoute
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response, StoredResult
from ndif.schema.status import Status
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore, ObjectStoreError
from ndif.stores.objects.port import end_key, result_key
from ndif.stores.responder import Responder, StoredResponse, last_response
from tests.on_loop import on_loop


class UnreachableStore(FileStore):
    """A store that cannot be reached."""

    async def get(self, key: str) -> bytes | None:
        raise ObjectStoreError("the object store at http://10.0.0.1 cannot be reached: no route")


async def nothing(request_id: str, stored: Status | None) -> None:
    """Do nothing, as for an empty queue."""


async def get_response(store: FileStore, job: str) -> httpx.Response:
    app = Starlette(
        routes=ResponseRoute(store, nothing, OpenAccounts(hotswapping=False)).routes(),
        exception_handlers=EXCEPTION_HANDLERS,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        return await http.get(f"http://here/response/{job}")


@on_loop
async def test_known_job_is_answered_and_unknown_job_is_error(tmp_path: Path) -> None:
    store, job = FileStore(tmp_path, 60), str(uuid.uuid4())
    for unknown in (job, "nobody"):
        answer = await get_response(store, unknown)
        assert answer.status_code == 200
        assert (answer.json()["id"], answer.json()["status"]) == (unknown, "ERROR")
    assert "is not the id of a job" in answer.json()["description"]
    assert "for 1m." in (await get_response(store, job)).json()["description"]
    await store.put(f"responses/{job}.json", b'{"id": 1, "status": "RUNNING"}')
    early = await get_response(store, job)
    assert (early.status_code, early.json()) == (200, {"id": 1, "status": "RUNNING"})


@on_loop
async def test_expired_result_is_error_with_expiry_time(tmp_path: Path) -> None:
    result_ttl_s, day_s = 3600.0, 86_400.0
    store = FileStore(tmp_path, result_ttl_s, response_ttl_s=7 * day_s)
    request = Request(
        DeploymentConfig("a/a", "a/a").key, "0.8", Wire.ENVELOPE, b"", False, "http://here"
    )
    url = store.url(result_key(request.id), "http://here")
    end = Response(request.id, Status.COMPLETED, "Done.", StoredResult(url, 7))
    await Responder(MemoryBroker(), store).respond(request, end)
    fresh = (await get_response(store, request.id)).json()
    assert fresh == {"id": request.id, "status": "COMPLETED", "description": "Done.", "data": url}
    kept = await last_response(store, request.id)
    assert kept is not None
    assert kept.expires is not None
    # A day later.
    past = StoredResponse(kept.fields, kept.user, kept.expires - day_s)
    await store.put(end_key(request.id), past.encode())
    late = (await get_response(store, request.id)).json()
    assert late["status"] == "ERROR"
    assert "was kept until 20" in late["description"]
    assert "1h after its end. Send the job again." in late["description"]


@on_loop
async def test_unreachable_store_answers_503(tmp_path: Path) -> None:
    unreachable = await get_response(UnreachableStore(tmp_path, 60), str(uuid.uuid4()))
    assert unreachable.status_code == 503
    assert int(unreachable.headers["Retry-After"]) > 0
    # Clients do not learn the store's address.
    assert "10.0.0.1" not in unreachable.text
    assert "Try again" in unreachable.json()["detail"]
