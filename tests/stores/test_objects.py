"""What every form of `ObjectStore` must do, and what is the file store's alone.

A second form is one more entry in `FORMS`: a store, and a client by which its addresses are reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from tests.on_loop import on_loop

from ndif.gateway.refusal import Refusal, answer
from ndif.gateway.results import Results
from ndif.stores.objects import FileStore, ObjectStore

LONG_S = 3600.0
HERE = "http://here"


@dataclass(frozen=True)
class Opened:
    store: ObjectStore
    http: httpx.AsyncClient


Opening = Callable[[Path, float], AbstractAsyncContextManager[Opened]]


@contextlib.asynccontextmanager
async def files(folder: Path, ttl_s: float) -> AsyncIterator[Opened]:
    store = FileStore(folder, ttl_s)
    app = Starlette(routes=Results(store).routes(), exception_handlers={Refusal: answer})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        yield Opened(store, http)


FORMS: dict[str, Opening] = {"files": files}


@pytest.fixture(params=FORMS)
def opening(request: pytest.FixtureRequest) -> Opening:
    return FORMS[request.param]


def result_key() -> str:
    return f"results/{uuid.uuid4()}.pt"


def response_key() -> str:
    return f"responses/{uuid.uuid4()}.json"


# Every form


@on_loop
async def test_what_was_put_is_got(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        keys = {result_key(): content for content in (b"", b"\x00\xff", os.urandom(3 << 20))}
        for key, content in keys.items():
            await opened.store.put(key, content)
        for key, content in keys.items():
            assert await opened.store.get(key) == content


@on_loop
async def test_a_later_put_replaces_an_earlier_one(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        for content in (b"a long first content", b"short"):
            await opened.store.put("responses/x.json", content)
            assert await opened.store.get("responses/x.json") == content


@on_loop
async def test_there_is_nothing_at_a_key_that_was_not_put(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        await opened.store.put("results/a.pt", b"1")
        for key in ("results/b.pt", "responses/a.pt", "results/a.pt/more", "results", "", "."):
            assert await opened.store.get(key) is None, key


@on_loop
async def test_an_upload_is_there_when_it_is_committed(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        key, upload = result_key(), opened.store.create()
        os.write(upload.fileno(), b"first ")
        assert await opened.store.get(key) is None
        os.write(upload.fileno(), b"and second")
        assert await upload.commit(key) == len(b"first and second")
        upload.discard()
        assert await opened.store.get(key) == b"first and second"


@on_loop
async def test_another_process_writes_an_upload(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        key, upload = result_key(), opened.store.create()
        fd = upload.fileno()
        writing = await asyncio.create_subprocess_exec(
            *("head", "-c", "2000000", "/dev/zero"), stdout=fd
        )
        assert await writing.wait() == 0
        assert await upload.commit(key) == 2_000_000
        assert await opened.store.get(key) == bytes(2_000_000)


@on_loop
async def test_uploads_do_not_mix(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        uploads = {result_key(): opened.store.create() for _ in range(5)}
        for _ in range(3):
            for key, upload in uploads.items():
                os.write(upload.fileno(), key.encode())
        for key, upload in uploads.items():
            await upload.commit(key)
        for key in uploads:
            assert await opened.store.get(key) == key.encode() * 3


@on_loop
async def test_a_discarded_upload_leaves_nothing(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        upload = opened.store.create()
        os.write(upload.fileno(), b"half of it")
        upload.discard()
        upload.discard()
        assert files_in(tmp_path) == {}


@on_loop
async def test_a_result_is_fetched_by_its_address(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        key, content = result_key(), os.urandom(100_000)
        await opened.store.put(key, content)
        url = opened.store.url(key, HERE)
        whole = await opened.http.get(url)
        assert (whole.status_code, whole.content) == (200, content)
        part = await opened.http.get(url, headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content[10:20])


@on_loop
async def test_an_address_is_good_for_its_own_result_alone(
    opening: Opening, tmp_path: Path
) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        key, other = result_key(), result_key()
        for each in (key, other):
            await opened.store.put(each, b"secret")
        url = httpx.URL(opened.store.url(key, HERE))
        names = [name for name in url.params if name != "expires"]
        wrong = [
            url.copy_with(path=url.path.replace(key[8:-3], other[8:-3])),
            url.copy_with(query=b""),
            *(url.copy_set_param(name, "") for name in url.params),
            *(url.copy_remove_param(name) for name in url.params),
            *(url.copy_set_param(name, flipped(url.params[name])) for name in names),
            *(url.copy_set_param(name, "é" * 64) for name in url.params),
        ]
        for each in wrong:
            refused = await opened.http.get(each)
            assert refused.status_code in (400, 403), each
            assert b"secret" not in refused.content
        assert (await opened.http.get(url)).content == b"secret"


@on_loop
async def test_an_address_cannot_be_given_more_time(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, LONG_S) as opened:
        key = result_key()
        await opened.store.put(key, b"secret")
        url = httpx.URL(opened.store.url(key, HERE))
        later = str(int(time.time()) + 10 * int(LONG_S))
        for expires in (
            later,
            f"+{later}",
            f" {later}",
            "inf",
            "1e99",
            "\uff19" * 10,
            "9" * 5000,
            "-1",
        ):
            refused = await opened.http.get(url.copy_set_param("expires", expires))
            assert refused.status_code in (400, 403), expires[:20]
            assert b"secret" not in refused.content


@on_loop
async def test_an_address_expires(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, 1.0) as opened:
        key = result_key()
        await opened.store.put(key, b"secret")
        url = opened.store.url(key, HERE)
        await asyncio.sleep(1.1)
        # Nothing sweeps here: the content is still there, and the address is void.
        assert await opened.store.get(key) == b"secret"
        refused = await opened.http.get(url)
        assert refused.status_code == 403
        assert b"secret" not in refused.content


@on_loop
async def test_objects_are_deleted_after_their_time(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, 0.4) as opened:
        await opened.store.start()
        try:
            new = response_key()
            keys = [result_key(), response_key()]
            for key in keys:
                await opened.store.put(key, b"1")
            await asyncio.sleep(0.2)
            await opened.store.put(new, b"2")
            for key in keys:
                assert await opened.store.get(key) == b"1"
            await asyncio.sleep(0.3)
            for key in keys:
                assert await opened.store.get(key) is None
            assert await opened.store.get(new) == b"2"
        finally:
            await opened.store.stop()


@on_loop
async def test_a_stopped_store_keeps_what_it_has(opening: Opening, tmp_path: Path) -> None:
    async with opening(tmp_path, 0.1) as opened:
        await opened.store.start()
        await opened.store.stop()
        await opened.store.put("responses/x.json", b"1")
        await asyncio.sleep(0.3)
        assert await opened.store.get("responses/x.json") == b"1"


# The file store


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
    """A store with a link that leads out of it, and a secret where it leads."""
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "store" / "results").mkdir(parents=True)
    (tmp_path / "store" / "results" / "link").symlink_to(tmp_path)
    return FileStore(tmp_path / "store", LONG_S)


@pytest.mark.parametrize("key", OUTSIDE, ids=lambda key: ascii(key[:30]))
@on_loop
async def test_no_key_reads_outside_the_folder(store: FileStore, key: str) -> None:
    assert await store.get(key) is None


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
    # Nothing is overwritten, and what was refused is not left lying about.
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
    # A restarted server signs anew.
    assert not other.verify("results/x.pt", expires, signature)
    for hostile in ("", "\0", "é", "\udcff", "-1", "9" * 5000, "0x10", "1_000"):
        assert not store.verify("results/x.pt", hostile, signature)
        assert not store.verify("results/x.pt", expires, hostile)


@contextlib.asynccontextmanager
async def serving(store: FileStore) -> AsyncIterator[str]:
    app = Starlette(routes=Results(store).routes(), exception_handlers={Refusal: answer})
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def gone(store: FileStore, key: str) -> None:
    while await store.get(key) is not None:  # noqa: ASYNC110 - nothing tells of a file's end
        await asyncio.sleep(0.05)


@on_loop
async def test_what_is_fetched_once_goes_when_it_has_been(tmp_path: Path) -> None:
    store = FileStore(tmp_path, LONG_S)
    key, content = result_key(), os.urandom(16 << 20)
    await store.put(key, content)
    async with serving(store) as base, httpx.AsyncClient() as http:
        url = store.url(key, base, once=True)
        part = await http.get(url, headers={"Range": "bytes=0-9"})
        assert part.content == content[:10]
        async with http.stream("GET", url) as leaving:
            await anext(leaving.aiter_raw(1000))
        # Longer than a fetched one is kept: neither a part nor a broken download counts.
        await asyncio.sleep(2.5)
        assert (await http.get(url)).content == content
        await asyncio.wait_for(gone(store, key), 10)
        assert (await http.get(url)).status_code == 404


@on_loop
async def test_what_may_be_fetched_again_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path, LONG_S)
    key = result_key()
    await store.put(key, b"content")
    async with serving(store) as base, httpx.AsyncClient() as http:
        once, often = store.url(key, base, once=True), store.url(key, base)
        # Neither address can be made into the other.
        assert (await http.get(once.removesuffix("&once=1"))).status_code == 403
        assert (await http.get(f"{often}&once=1")).status_code == 403
        assert (await http.get(often)).content == b"content"
        await asyncio.sleep(2.5)
        assert (await http.get(often)).content == b"content"


def test_results_are_their_users_own(tmp_path: Path) -> None:
    asyncio.run(FileStore(tmp_path, LONG_S).put("results/x.pt", b"1"))
    assert (tmp_path / "results" / "x.pt").stat().st_mode & 0o077 == 0


def test_a_sweep_takes_what_is_old_and_unfinished_uploads_too(tmp_path: Path) -> None:
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
    store.sweep()
    left = files_in(tmp_path)
    assert len(left) == 2
    assert new_result in left
    running.discard()
    abandoned.discard()


def test_a_sweep_leaves_what_is_not_the_stores(tmp_path: Path) -> None:
    """`--results-dir` may name a folder that has something else in it."""
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
    FileStore(tmp_path, LONG_S).sweep()
    assert not (tmp_path / "results" / f"{uuid.UUID(int=7)}.pt").exists()
    assert all(path.read_bytes() == b"years of work" for path in foreign)


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with what is in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def flipped(text: str) -> str:
    """`text` with another last character."""
    return text[:-1] + ("0" if text[-1] != "0" else "1")
