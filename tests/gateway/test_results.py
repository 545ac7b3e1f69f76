"""`GET /response/{id}` of a known and an unknown job, and without the store."""

from __future__ import annotations

import uuid
from pathlib import Path

import httpx
from starlette.applications import Starlette

from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.results import ResponseRoute
from ndif.schema.status import Status
from ndif.stores.accounts import OpenAccounts
from ndif.stores.objects import FileStore, ObjectStoreError
from tests.on_loop import on_loop


class UnreachableStore(FileStore):
    """A store that cannot be reached."""

    async def get(self, key: str) -> bytes | None:
        raise ObjectStoreError("the object store at http://10.0.0.1 cannot be reached: no route")


async def nothing(request_id: str, stored: Status | None) -> None:
    """A queue in which nothing waits."""


async def get_response(store: FileStore, job: str) -> httpx.Response:
    app = Starlette(
        routes=ResponseRoute(store, nothing, OpenAccounts(hotswapping=False)).routes(),
        exception_handlers=EXCEPTION_HANDLERS,
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        return await http.get(f"http://here/response/{job}")


@on_loop
async def test_a_known_job_is_answered_and_an_unknown_one_is_404(tmp_path: Path) -> None:
    store, job = FileStore(tmp_path, 60), str(uuid.uuid4())
    unknown = await get_response(store, job)
    assert unknown.status_code == 404
    assert "for 1m." in unknown.json()["detail"]
    await store.put(f"responses/{job}.json", b'{"id": 1, "status": "RUNNING"}')
    known = await get_response(store, job)
    assert (known.status_code, known.json()) == (200, {"id": 1, "status": "RUNNING"})


@on_loop
async def test_an_unreachable_store_answers_503(tmp_path: Path) -> None:
    unreachable = await get_response(UnreachableStore(tmp_path, 60), str(uuid.uuid4()))
    assert unreachable.status_code == 503
    assert int(unreachable.headers["Retry-After"]) > 0
    # Clients do not learn the store's address.
    assert "10.0.0.1" not in unreachable.text
    assert "Try again" in unreachable.json()["detail"]
