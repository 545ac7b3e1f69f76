"""`GET /response/{id}` where the store has it, has it not, and cannot be reached."""

from __future__ import annotations

import uuid
from pathlib import Path

import httpx
from starlette.applications import Starlette
from tests.on_loop import on_loop

from ndif.gateway.refusal import Refusal, answer, answer_store_away
from ndif.gateway.responses import Responses
from ndif.stores.objects import FileStore, ObjectStoreError


class AwayStore(FileStore):
    """A store that cannot be reached."""

    async def get(self, key: str) -> bytes | None:
        raise ObjectStoreError("the object store at http://10.0.0.1 cannot be reached: no route")


async def asked(store: FileStore, job: str) -> httpx.Response:
    app = Starlette(
        routes=Responses(store).routes(),
        exception_handlers={Refusal: answer, ObjectStoreError: answer_store_away},
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        return await http.get(f"http://here/response/{job}")


@on_loop
async def test_what_is_known_and_what_is_not(tmp_path: Path) -> None:
    store, job = FileStore(tmp_path, 60), str(uuid.uuid4())
    unknown = await asked(store, job)
    assert unknown.status_code == 404
    assert "60 seconds" in unknown.json()["detail"]
    await store.put(f"responses/{job}.json", b'{"id": 1}')
    known = await asked(store, job)
    assert (known.status_code, known.json()) == (200, {"id": 1})


@on_loop
async def test_a_store_that_is_away_is_no_unknown_job(tmp_path: Path) -> None:
    away = await asked(AwayStore(tmp_path, 60), str(uuid.uuid4()))
    assert away.status_code == 503
    assert int(away.headers["Retry-After"]) > 0
    # Where the store is, is nothing that a client should know.
    assert "10.0.0.1" not in away.text
    assert "Try again" in away.json()["detail"]
