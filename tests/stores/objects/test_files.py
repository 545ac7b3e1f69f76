"""Behaviour specific to the file store: its private folder, and the URLs that it signs and serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.results import ResultRoute
from ndif.stores.objects import DiskError, FileStore, files
from tests.on_loop import on_loop
from tests.stores.objects.stores import files_in, request_key, response_key, result_key
from tests.waiting import eventually, time_passes_async

pytestmark = pytest.mark.process

LONG_S = 3600.0
REFETCH_S = 0.3
HERE = "http://here"

OUTSIDE = (
    "../outside",
    "results/../../outside",
    "results/./.././../outside",
    "results/link/outside",
    "results/nul\0",
    "results/" + "x" * 300,
    "results/" + "x/" * 3000,
)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A store with a link that leads out of it to a secret."""
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "store" / "results").mkdir(parents=True)
    (tmp_path / "store" / "results" / "link").symlink_to(tmp_path)
    return FileStore(tmp_path / "store", LONG_S)


@pytest.mark.parametrize("key", OUTSIDE, ids=lambda key: ascii(key[:30]))
@on_loop
async def test_no_key_reads_outside_the_folder(store: FileStore, key: str) -> None:
    assert await store.get(key) is None


@on_loop
async def test_ping_fails_if_folder_is_gone(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "results", LONG_S)
    await store.ping()
    assert not [*store.folder.iterdir()]
    store.folder.rmdir()
    with pytest.raises(DiskError, match="No such file"):
        await store.ping()


@on_loop
async def test_no_absolute_key_reads_outside_the_folder(store: FileStore, tmp_path: Path) -> None:
    assert await store.get(str(tmp_path / "outside")) is None
    assert await store.get("/etc/passwd") is None


@pytest.mark.parametrize("key", OUTSIDE, ids=lambda key: ascii(key[:30]))
@on_loop
async def test_no_key_writes_outside_the_folder(store: FileStore, tmp_path: Path, key: str) -> None:
    before = files_in(tmp_path)
    with pytest.raises((OSError, ValueError)):
        await store.put(key, b"overwritten")
    # Nothing is overwritten, and refused content leaves no files.
    assert files_in(tmp_path) == before


@on_loop
async def test_no_absolute_key_writes_outside_the_folder(store: FileStore, tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        await store.put(str(tmp_path / "outside"), b"overwritten")
    assert (tmp_path / "outside").read_bytes() == b"secret"


def test_a_signature_is_verified_by_the_store_that_signed_it(tmp_path: Path) -> None:
    store, other = FileStore(tmp_path, LONG_S), FileStore(tmp_path, LONG_S)
    query = httpx.URL(store.url("results/x.pt", HERE)).params
    expires, signature = query["expires"], query["signature"]
    assert store.verify("results/x.pt", expires, signature)
    assert not store.verify("results/y.pt", expires, signature)
    assert not store.verify("results/x.pt", str(int(expires) + 1), signature)
    # A restarted server uses a new signing key.
    assert not other.verify("results/x.pt", expires, signature)
    for hostile in ("", "\0", "é", "\udcff", "-1", "9" * 5000, "0x10", "1_000"):
        assert not store.verify("results/x.pt", hostile, signature)
        assert not store.verify("results/x.pt", expires, hostile)


@contextlib.asynccontextmanager
async def serving(store: FileStore) -> AsyncIterator[str]:
    app = Starlette(routes=ResultRoute(store).routes(), exception_handlers=EXCEPTION_HANDLERS)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@on_loop
async def test_result_fetched_by_one_time_url_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_REFETCH_S", REFETCH_S)
    store = FileStore(tmp_path, LONG_S)
    key, content = result_key(), os.urandom(16 << 20)
    await store.put(key, content)
    async with serving(store) as base, httpx.AsyncClient() as http:
        url = store.url(key, base, once=True)
        part = await http.get(url, headers={"Range": "bytes=0-9"})
        assert part.content == content[:10]
        async with http.stream("GET", url) as leaving:
            await anext(leaving.aiter_raw(1000))
        # This is longer than a fetched result is kept: neither a partial nor a broken download counts.
        await time_passes_async(2 * REFETCH_S)
        assert (await http.get(url)).content == content

        async def is_gone() -> bool:
            return await store.get(key) is None

        await eventually(is_gone)
        assert (await http.get(url)).status_code == 404


@on_loop
async def test_result_fetched_by_reusable_url_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_REFETCH_S", REFETCH_S)
    store = FileStore(tmp_path, LONG_S)
    key = result_key()
    await store.put(key, b"content")
    async with serving(store) as base, httpx.AsyncClient() as http:
        once, often = store.url(key, base, once=True), store.url(key, base)
        # Neither URL can be turned into the other.
        assert (await http.get(once.removesuffix("&once=1"))).status_code == 403
        assert (await http.get(f"{often}&once=1")).status_code == 403
        assert (await http.get(often)).content == b"content"
        await time_passes_async(2 * REFETCH_S)
        assert (await http.get(often)).content == b"content"


def test_result_files_are_readable_only_by_owner(tmp_path: Path) -> None:
    asyncio.run(FileStore(tmp_path, LONG_S).put("results/x.pt", b"1"))
    assert (tmp_path / "results" / "x.pt").stat().st_mode & 0o077 == 0


def test_sweep_deletes_old_objects_and_abandoned_uploads(tmp_path: Path) -> None:
    store = FileStore(tmp_path, LONG_S)
    old_result, new_result, old_response = result_key(), result_key(), response_key()
    for key in (old_result, new_result, old_response):
        asyncio.run(store.put(key, b"1"))
    abandoned, running = store.create(), store.create()
    assert len(files_in(tmp_path)) == 5
    old = time.time() - LONG_S - 1
    for path in (tmp_path / old_result, tmp_path / old_response):
        os.utime(path, (old, old))
    os.utime(abandoned.fileno(), (old, old))
    asyncio.run(store.sweep())
    left = files_in(tmp_path)
    assert len(left) == 2
    assert new_result in left
    running.discard()
    abandoned.discard()


@on_loop
async def test_sweep_runs_in_another_thread(tmp_path: Path) -> None:
    class Noting(FileStore):
        def _sweep(self, dry: bool) -> dict[str, int]:
            swept_by.append(threading.get_ident())
            return super()._sweep(dry)

    swept_by: list[int] = []
    store = Noting(tmp_path, 0.01)
    await store.start()
    await eventually(lambda: len(swept_by) >= 2)
    await store.stop()
    assert threading.get_ident() not in swept_by


def test_responses_outlast_results_and_dry_sweep_only_counts(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 60, response_ttl_s=3600)
    result, response, older = result_key(), response_key(), response_key()
    for key, age_s in ((result, 61), (response, 61), (older, 3601)):
        asyncio.run(store.put(key, b"1"))
        os.utime(tmp_path / key, (time.time() - age_s,) * 2)
    expired = {"results": 1, "responses": 1, "ends": 0, "requests": 0, "owners": 0}
    assert asyncio.run(store.sweep(dry=True)) == expired
    assert set(files_in(tmp_path)) == {result, response, older}
    assert asyncio.run(store.sweep()) == expired
    assert set(files_in(tmp_path)) == {response}
    assert sum(asyncio.run(store.sweep()).values()) == 0


def test_sweep_keeps_requests_that_may_still_wait(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 60)
    waiting, forgotten = request_key(), request_key()
    for key, age_s in ((waiting, 3600), (forgotten, 25 * 3600)):
        asyncio.run(store.put(key, b"1"))
        os.utime(tmp_path / key, (time.time() - age_s,) * 2)
    asyncio.run(store.sweep())
    assert set(files_in(tmp_path)) == {waiting}


def test_sweep_keeps_foreign_files(tmp_path: Path) -> None:
    """`--results-dir` may name a folder with other content."""
    foreign = [
        tmp_path / "thesis.tex",
        tmp_path / "data" / "results" / "table.csv",
        tmp_path / "results" / "probe.pt",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"years of work")
    asyncio.run(FileStore(tmp_path, LONG_S).put(f"results/{uuid.UUID(int=7)}.pt", b"1"))
    old = time.time() - 100 * LONG_S
    for path in (*foreign, tmp_path / "results" / f"{uuid.UUID(int=7)}.pt"):
        os.utime(path, (old, old))
    asyncio.run(FileStore(tmp_path, LONG_S).sweep())
    assert not (tmp_path / "results" / f"{uuid.UUID(int=7)}.pt").exists()
    assert all(path.read_bytes() == b"years of work" for path in foreign)
