"""The contract of every form of `ObjectStore`. The fixture `form` lists the forms."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.results import ResultRoute
from ndif.schema.payload import ZSTD_MAGIC
from ndif.stores.objects import FileStore, ObjectStore, ObjectStoreError
from ndif.stores.objects.result_quota import ResultQuota, ResultQuotaLimits
from tests.on_loop import on_loop
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer
from tests.stores.objects.stores import files_in, request_key, response_key, result_key
from tests.waiting import eventually, time_passes_async

pytestmark = pytest.mark.process

LONG_S = 3600.0
CLOCK_S = 0.05
"""Seconds, more than the resolution of file times."""
HERE = "http://here"


@dataclass(frozen=True)
class Form:
    """A store, and a client that reaches its URLs."""

    open: Callable[
        [Path, float], AbstractAsyncContextManager[tuple[ObjectStore, httpx.AsyncClient]]
    ]
    expires: str
    """The URL parameter with the expiry time."""
    ttl_s: float
    """A time to live that the store can distinguish from half of it."""


@contextlib.asynccontextmanager
async def on_files(
    folder: Path, ttl_s: float
) -> AsyncIterator[tuple[ObjectStore, httpx.AsyncClient]]:
    store = FileStore(folder, ttl_s)
    app = Starlette(routes=ResultRoute(store).routes(), exception_handlers=EXCEPTION_HANDLERS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        yield store, http


def on_s3(server: SwiftServer) -> Form:
    from ndif.stores.objects.s3 import S3Address, S3Store

    @contextlib.asynccontextmanager
    async def opened(_: Path, ttl_s: float) -> AsyncIterator[tuple[ObjectStore, httpx.AsyncClient]]:
        bucket = f"test-{uuid.uuid4()}"
        address = S3Address(server.url, server.url, ACCESS_KEY, SECRET_KEY, bucket)
        async with httpx.AsyncClient() as http:
            yield S3Store(address, ttl_s), http

    return Form(opened, "X-Amz-Expires", 4.0)


@pytest.fixture(params=["files", "s3"])
def form(request: pytest.FixtureRequest) -> Form:
    if request.param == "s3":
        pytest.importorskip("obstore", reason="obstore needs Python 3.11")
        return on_s3(request.getfixturevalue("s3"))
    return Form(on_files, "expires", 0.4)


@on_loop
async def test_available_object_store_answers_ping(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        for _ in range(2):  # the S3 bucket is made with its first object
            await store.ping()
            assert not await store.unexpired("responses")
            await store.put(result_key(), b"1")
        assert store.folder.exists()


@on_loop
async def test_stored_objects_are_read_back(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        keys = {result_key(): content for content in (b"", b"\x00\xff", os.urandom(3 << 20))}
        for key, content in keys.items():
            await store.put(key, content)
        for key, content in keys.items():
            assert await store.get(key) == content


@pytest.mark.parametrize(
    ("beginning", "ending"), [(ZSTD_MAGIC, ".zst"), (b"PK\x03\x04", ""), (ZSTD_MAGIC[:3], "")]
)
@pytest.mark.parametrize("size", [0, 20 << 20], ids=["small", "in parts"])
@on_loop
async def test_result_download_has_file_name(
    form: Form, tmp_path: Path, beginning: bytes, ending: str, size: int
) -> None:
    async with form.open(tmp_path, LONG_S) as (store, http):
        key, content = result_key(), beginning + bytes(size)
        upload = store.create()
        os.truncate(upload.fileno(), len(content))
        os.pwrite(upload.fileno(), beginning, 0)
        await upload.commit(key)
        name = f'attachment; filename="{key.partition("/")[2]}{ending}"'
        for headers, status in (({}, 200), ({"Range": "bytes=1-2"}, 206)):
            answer = await http.get(store.url(key, HERE), headers=headers)
            assert answer.status_code == status
            assert answer.headers["Content-Disposition"] == name
            assert answer.content == (content if status == 200 else content[1:3])


def by_descriptor(file: int) -> Callable[[], object]:
    own = os.dup(file)
    return lambda: os.pwrite(own, b"spoil", 0)


def by_memory(file: int) -> Callable[[], object]:
    pages = mmap.mmap(file, 5)
    return lambda: pages.write(b"spoil")


def by_message(file: int) -> Callable[[], object]:
    own, other_end = socket.socketpair()
    socket.send_fds(own, [b"a file"], [file])
    return lambda: os.pwrite(socket.recv_fds(other_end, 6, 1)[1][0], b"spoil", 0)


@pytest.mark.parametrize("other", [by_descriptor, by_memory, by_message])
@on_loop
async def test_upload_open_to_other_writers_is_not_sealed(
    form: Form, tmp_path: Path, other: Callable[[int], Callable[[], object]]
) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        upload = store.create()
        os.write(upload.fileno(), b"ready")
        spoil = other(upload.fileno())
        if upload.seal():
            with pytest.raises(PermissionError):
                spoil()
        else:
            spoil()
        content = os.pread(upload.fileno(), 10, 0)
        upload.discard()
    # Memory is sealed even if others have a descriptor.
    was_sealed = not isinstance(store, FileStore) and other is not by_memory
    assert content == (b"ready" if was_sealed else b"spoil")


@pytest.mark.parametrize("is_read", [False, True])
@on_loop
async def test_upload_without_other_writers_is_sealed(
    form: Form, tmp_path: Path, is_read: bool
) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        key, upload = result_key(), store.create()
        os.write(upload.fileno(), b"ready")
        os.close(os.dup(upload.fileno()))
        read = os.open(f"/proc/self/fd/{upload.fileno()}", os.O_RDONLY) if is_read else None
        assert upload.seal()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(upload.fileno(), b"more")
        if read is not None:
            os.close(read)
        assert await upload.commit(key) == 5
        assert await store.get(key) == b"ready"


@on_loop
async def test_later_put_replaces_earlier_one(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        for content in (b"a long first content", b"short"):
            await store.put("responses/x.json", content)
            assert await store.get("responses/x.json") == content


@on_loop
async def test_a_payload_is_stored_from_memory_and_from_its_file(
    form: Form, tmp_path: Path
) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        content = os.urandom(3 << 20)
        file = store.create_payload()
        file.append(content[:1000])
        file.append(content[1000:])
        keys = [f"requests/{uuid.uuid4()}" for _ in range(2)]
        await store.put_payload(keys[0], bytearray(content))
        await store.put_payload(keys[1], file)
        file.discard()
        assert not file.path.exists()
        assert [await store.get(key) for key in keys] == [content, content]


@on_loop
async def test_missing_key_reads_as_none(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        await store.put("results/a.pt", b"1")
        for key in ("results/b.pt", "responses/a.pt", "results/a.pt/more", "results", "", "."):
            assert await store.get(key) is None, key


@on_loop
async def test_upload_is_readable_only_after_commit(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        key, upload = result_key(), store.create()
        os.write(upload.fileno(), b"first ")
        assert await store.get(key) is None
        os.write(upload.fileno(), b"and second")
        assert await upload.commit(key) == len(b"first and second")
        upload.discard()
        assert await store.get(key) == b"first and second"


@on_loop
async def test_another_process_can_write_upload(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        key, upload = result_key(), store.create()
        fd = upload.fileno()
        writing = await asyncio.create_subprocess_exec(
            *("head", "-c", "2000000", "/dev/zero"), stdout=fd
        )
        assert await writing.wait() == 0
        assert await upload.commit(key) == 2_000_000
        assert await store.get(key) == bytes(2_000_000)


@on_loop
async def test_concurrent_uploads_do_not_mix(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        uploads = {result_key(): store.create() for _ in range(5)}
        for _ in range(3):
            for key, upload in uploads.items():
                os.write(upload.fileno(), key.encode())
        for key, upload in uploads.items():
            await upload.commit(key)
        for key in uploads:
            assert await store.get(key) == key.encode() * 3


@on_loop
async def test_a_discarded_upload_leaves_nothing(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        upload = store.create()
        os.write(upload.fileno(), b"half of it")
        fd = upload.fileno()
        upload.discard()
        upload.discard()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        assert files_in(tmp_path) == {}


@on_loop
async def test_result_is_downloadable_by_its_url(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, http):
        key, content = result_key(), os.urandom(100_000)
        await store.put(key, content)
        url = store.url(key, HERE)
        whole = await http.get(url)
        assert (whole.status_code, whole.content) == (200, content)
        part = await http.get(url, headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content[10:20])


@on_loop
async def test_result_url_is_valid_only_for_its_result(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, http):
        key, other = result_key(), result_key()
        for name in (key, other):
            await store.put(name, b"secret")
        url = httpx.URL(store.url(key, HERE))
        names = [name for name in url.params if name != form.expires]
        wrong = [
            url.copy_with(path=url.path.replace(key[8:-3], other[8:-3])),
            url.copy_with(query=b""),
            *(url.copy_set_param(name, "") for name in url.params),
            *(url.copy_remove_param(name) for name in url.params),
            *(url.copy_set_param(name, flipped(url.params[name])) for name in names),
            *(url.copy_set_param(name, "é" * 64) for name in url.params),
        ]
        for name in wrong:
            refused = await http.get(name)
            assert refused.status_code in (400, 403), name
            assert b"secret" not in refused.content
        assert (await http.get(url)).content == b"secret"


@on_loop
async def test_expiry_of_result_url_cannot_be_extended(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, http):
        key = result_key()
        await store.put(key, b"secret")
        url = httpx.URL(store.url(key, HERE))
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
            refused = await http.get(url.copy_set_param(form.expires, expires))
            assert refused.status_code in (400, 403), expires[:20]
            assert b"secret" not in refused.content


@on_loop
async def test_result_url_expires(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, 1.0) as (store, http):
        key = result_key()
        await store.put(key, b"secret")
        url = store.url(key, HERE)

        async def refused() -> httpx.Response | None:
            answer = await http.get(url)
            return None if answer.status_code == 200 else answer

        answer = await eventually(refused)
        assert answer.status_code == 403
        assert b"secret" not in answer.content
        # There is no sweep here: the content still exists, but the URL has expired.
        assert await store.get(key) == b"secret"


@on_loop
async def test_objects_are_deleted_after_their_time_to_live(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, form.ttl_s) as (store, _):
        await store.start()
        try:
            # A request may wait longer than a result is kept.
            new, request = response_key(), request_key()
            keys = [result_key(), response_key()]
            stored: dict[str, float] = {}

            async def is_gone(key: str) -> bool:
                """Return True if the object is gone; check that it was not deleted too early."""
                if await store.get(key) is not None:
                    return False
                assert time.monotonic() - stored[key] >= form.ttl_s - CLOCK_S
                return True

            for key in (*keys, request):
                stored[key] = time.monotonic()
                await store.put(key, b"1")
            await time_passes_async(form.ttl_s * 0.7)
            stored[new] = time.monotonic()
            await store.put(new, b"2")
            for key in keys:
                await eventually(partial(is_gone, key))
            await is_gone(new)
            assert await store.get(request) == b"1"
        finally:
            await store.stop()


@on_loop
async def test_deleted_object_is_gone(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        key, other = request_key(), request_key()
        for name in (key, other):
            await store.put(name, b"1")
        for _ in range(2):
            await store.delete(key)
            assert await store.get(key) is None
        await store.delete(result_key())
        assert await store.get(other) == b"1"


@pytest.mark.parametrize("key", ["", ".", "..", "results", "results/", "other/x", "results/a/../b"])
@on_loop
async def test_keys_outside_known_folders_are_refused(form: Form, tmp_path: Path, key: str) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        kept = result_key()
        await store.put(kept, b"1")
        with pytest.raises((ValueError, OSError)):
            await store.put(key, b"2")
        await store.delete(key)
        assert await store.get(key) is None
        assert await store.get(kept) == b"1"


@on_loop
async def test_stopped_store_deletes_nothing(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, 0.1) as (store, _):
        await store.start()
        await store.stop()
        await store.put("responses/x.json", b"1")
        await time_passes_async(0.3)
        assert await store.get("responses/x.json") == b"1"


def flipped(text: str) -> str:
    """Return `text` with another last character."""
    return text[:-1] + ("0" if text[-1] != "0" else "1")


# ResultQuota for results.


async def store_result(store: ObjectStore, user: str, size: int) -> str | None:
    """Store a result like a host; return the reason if it was refused."""
    request = str(uuid.uuid4())
    if why := await store.room.admit(request, user, size):
        return why
    await store.put(f"results/{request}.pt", bytes(size))
    store.room.settle(request, stored=True)
    return None


@on_loop
async def test_results_are_limited_per_user_and_in_total(form: Form, tmp_path: Path) -> None:
    limits = ResultQuotaLimits(1000, 0.5)
    async with form.open(tmp_path, LONG_S) as (store, _):
        store.limits = limits
        assert await store_result(store, "ada", 400) is None
        why = await store_result(store, "ada", 101)
        assert why is not None
        assert "takes 101B and was not stored: your stored results take 400B" in why
        assert "of at most 500B, which is each user's limit (NDIF_MAX_STORED_SHARE)" in why
        assert "is deleted in 60 min" in why
        assert await store_result(store, "ada", 100) is None
        assert await store_result(store, "bob", 450) is None
        why = await store_result(store, "eve", 51)
        assert why is not None
        assert "the stored results of all users take 950B, of at most 1000B together" in why
        assert await store_result(store, "eve", 50) is None
        assert await store_result(store, "eve", 0) is None


@on_loop
async def test_users_own_limit_only_lowers_the_share(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        store.limits = ResultQuotaLimits(1000, 0.5)
        assert await store_result(store, "ada", 200) is None
        why = await store.room.admit(str(uuid.uuid4()), "ada", 101, 300)
        assert why is not None
        assert "your stored results take 200B, of at most 300B, which is your limit" in why
        assert await store.room.admit(str(uuid.uuid4()), "ada", 100, 300) is None
        # It does not raise the limit above the general share.
        assert await store.room.admit(str(uuid.uuid4()), "ada", 201, 900) is not None


@on_loop
async def test_stored_results_count_after_restart(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        store.limits = ResultQuotaLimits(1000, 0.5)
        assert await store_result(store, "ada", 400) is None
        await store.put(result_key(), bytes(300))  # of an unknown user
        store.room = ResultQuota(store)
        assert await store_result(store, "ada", 101) is not None
        assert await store_result(store, "bob", 301) is not None
        assert await store_result(store, "bob", 300) is None


@on_loop
async def test_unused_and_deleted_results_free_quota(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        store.limits = ResultQuotaLimits(1000, 0.5)
        admitted = [str(uuid.uuid4()) for _ in range(5)]
        for job_id in admitted:
            assert await store.room.admit(job_id, "ada", 100) is None
        # Admitted results count before they are stored.
        assert await store_result(store, "ada", 1) is not None
        store.room.settle(admitted[0], stored=False)
        assert await store_result(store, "ada", 100) is None
        for job_id in admitted[1:]:
            store.room.settle(job_id, stored=False)
        # A deleted result, for example a fetched one, is not counted once its space is needed.
        [result] = list(await store.unexpired("results"))
        await store.delete(f"results/{result}")
        assert await store_result(store, "ada", 500) is None
        assert await store_result(store, "ada", 1) is not None


@on_loop
async def test_expired_results_free_quota(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, 0.4) as (store, _):
        store.limits = ResultQuotaLimits(1000, 0.5)
        assert await store_result(store, "ada", 500) is None

        async def has_room() -> bool:
            return await store_result(store, "ada", 500) is None

        async def is_alone() -> bool:
            return len(await store.unexpired("results")) <= 1

        await eventually(has_room)
        # S3 reports ages in whole seconds of another clock: an expired object may briefly seem fresh again.
        await eventually(is_alone)


@on_loop
async def test_concurrent_results_respect_quota(form: Form, tmp_path: Path) -> None:
    async with form.open(tmp_path, LONG_S) as (store, _):
        store.limits = ResultQuotaLimits(1000, 0.5)
        ids = [str(uuid.uuid4()) for _ in range(20)]
        refused = await asyncio.gather(*(store.room.admit(job_id, "ada", 100) for job_id in ids))
        assert len([why for why in refused if why is None]) == 5


@on_loop
async def test_result_without_stored_owner_takes_no_quota(tmp_path: Path) -> None:
    store = FileStore(tmp_path, LONG_S, limits=ResultQuotaLimits(1000, 0.5))
    in_the_way = tmp_path / "owners"
    in_the_way.write_bytes(b"")
    for _ in range(3):
        with pytest.raises(ObjectStoreError):
            await store_result(store, "ada", 400)
    in_the_way.unlink()
    assert await store_result(store, "ada", 400) is None
