"""Behaviour specific to the S3 store, against a real server: URLs, the bucket, an unavailable server."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import socket
import ssl
import subprocess
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from ndif.stores.objects import MemoryFullError, ObjectStoreError, Upload
from tests.on_loop import on_loop
from tests.services.process import free_port
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer
from tests.stores.objects.stores import request_key, response_key, result_key
from tests.waiting import PATIENCE_S, eventually, time_passes_async

pytest.importorskip("obstore", reason="obstore needs Python 3.11")

from ndif.stores.objects import s3 as s3_module
from ndif.stores.objects.s3 import S3Address, S3Store

pytestmark = pytest.mark.engine

LONG_S = 3600.0
MIB = 1 << 20


@pytest.fixture
def address(s3: SwiftServer) -> S3Address:
    """A bucket that does not exist yet."""
    return S3Address(s3.url, s3.url, ACCESS_KEY, SECRET_KEY, f"test-{uuid.uuid4()}")


def filled(store: S3Store, content: bytes) -> Upload:
    upload = store.create()
    os.truncate(upload.fileno(), len(content))
    os.pwrite(upload.fileno(), content, 0)
    return upload


# Addresses


@on_loop
async def test_result_url_is_signed_for_public_host(address: S3Address) -> None:
    public = address.url.replace("127.0.0.1", "localhost")
    store = S3Store(dataclasses.replace(address, public_url=public), LONG_S)
    key = result_key()
    await store.put(key, b"secret")
    url = httpx.URL(store.url(key, "http://gateway"))
    assert str(url).startswith(f"{public}/{address.bucket}/{key}?")
    async with httpx.AsyncClient() as http:
        assert (await http.get(url)).content == b"secret"
        # The host is signed, too, so the URL is invalid for another host.
        refused = await http.get(url.copy_with(host="127.0.0.1"))
    assert refused.status_code == 403
    assert b"secret" not in refused.content


@on_loop
async def test_result_url_allows_only_reading(address: S3Address) -> None:
    store = S3Store(address, LONG_S)
    key = result_key()
    await store.put(key, b"content")
    url = store.url(key, "")
    async with httpx.AsyncClient() as http:
        for answer in (await http.put(url, content=b"other"), await http.delete(url)):
            assert answer.status_code == 403
    assert await store.get(key) == b"content"


def test_result_url_lives_as_long_as_its_result() -> None:
    address = S3Address("http://h:1", "https://public", "a", "b")
    for ttl_s, seconds in ((7200, "7200"), (0.5, "1"), (1e9, str(7 * 24 * 3600))):
        url = httpx.URL(S3Store(address, ttl_s).url("results/x.pt", ""))
        assert url.params["X-Amz-Expires"] == seconds


def test_aws_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = S3Store(S3Address("http://h:1", "http://h:1", "ours", "b"), LONG_S)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "theirs",
        "AWS_SESSION_TOKEN": "theirs",
        "AWS_ENDPOINT_URL_S3": "http://theirs",
        "AWS_REGION": "eu-theirs-1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_SKIP_SIGNATURE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    url = S3Store(S3Address("http://h:1", "http://h:1", "ours", "b"), LONG_S).url(
        "results/x.pt", ""
    )
    assert "theirs" not in url
    assert httpx.URL(url).params.keys() == httpx.URL(plain.url("results/x.pt", "")).params.keys()


def test_s3_secret_is_not_in_repr() -> None:
    assert "hush" not in repr(S3Address("http://h", "http://h", "key", "hush"))


# Uploads


@on_loop
async def test_large_result_is_sent_without_copying(address: S3Address) -> None:
    store = S3Store(address, LONG_S)
    key, size = result_key(), 64 * MIB
    upload = store.create()
    for _ in range(64):
        os.write(upload.fileno(), os.urandom(MIB))
    before = peak = own_memory()
    committing = asyncio.create_task(upload.commit(key))
    while not committing.done():
        await asyncio.sleep(0.01)
        peak = max(peak, own_memory())
    assert committing.result() == size
    assert peak - before < size // 2
    content = await store.get(key)
    assert content is not None
    assert len(content) == size


def own_memory() -> int:
    """Return the anonymous memory of this process, which excludes the uploads' memory files."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


@pytest.mark.parametrize("size", [0, 1, 16 * MIB, 16 * MIB + 1, 40 * MIB])
@on_loop
async def test_upload_of_any_size_arrives_whole(address: S3Address, size: int) -> None:
    store = S3Store(address, LONG_S)
    key, content = result_key(), os.urandom(size)
    assert await filled(store, content).commit(key) == size
    async with httpx.AsyncClient() as http:
        assert (await http.get(store.url(key, ""))).content == content


def test_upload_cannot_be_truncated() -> None:
    """The file is mapped as memory, and a truncated mapping would crash its reader."""
    upload = filled(S3Store(S3Address("http://h:1", "http://h:1", "a", "b"), LONG_S), b"content")
    with pytest.raises(PermissionError):
        os.truncate(upload.fileno(), 1)
    upload.discard()


@on_loop
async def test_uploads_wait_for_free_memory() -> None:
    left = 10 * MIB
    address = S3Address("http://h:1", "http://h:1", "a", "b")
    store = S3Store(address, LONG_S, memory=lambda: left)
    first = await store.create_for(6 * MIB)
    waiting = asyncio.create_task(store.create_for(6 * MIB))
    # The kernel counts written memory.
    os.pwrite(first.fileno(), bytes(2 * MIB), 0)
    left -= 2 * MIB
    await time_passes_async(0.3)
    assert not waiting.done()
    first.discard()
    left += 2 * MIB
    (await waiting).discard()
    (await store.create_for(left)).discard()


@on_loop
async def test_result_without_free_memory_is_refused_with_reason() -> None:
    address = S3Address("http://h:1", "http://h:1", "a", "b")
    store = S3Store(address, LONG_S, patience_s=0, memory=lambda: 10 * MIB)
    taken = await store.create_for(4 * MIB)
    with pytest.raises(
        MemoryFullError, match="it takes 8MiB, and this server has 6MiB of memory for results"
    ):
        await store.create_for(8 * MIB)
    taken.discard()


# The bucket


@on_loop
async def test_bucket_is_made_by_first_put(address: S3Address) -> None:
    store, other = S3Store(address, LONG_S), S3Store(address, LONG_S)
    assert await store.get(result_key()) is None
    await store.delete(result_key())
    await store.sweep()
    keys = [result_key() for _ in range(6)]
    stores = (store, other) * 3
    # All of them find no bucket, and all make it.
    await asyncio.gather(*(s.put(k, b"1") for s, k in zip(stores, keys, strict=True)))
    for key in keys:
        assert await store.get(key) == b"1"


@on_loop
async def test_bucket_is_made_by_upload(address: S3Address) -> None:
    store, content = S3Store(address, LONG_S), os.urandom(20 * MIB)
    key = result_key()
    await filled(store, content).commit(key)
    assert await store.get(key) == content


# Expired objects


@on_loop
async def test_several_servers_sweep_one_bucket(
    address: S3Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief, lasting = S3Store(address, 1.0), S3Store(address, LONG_S)
    old = [result_key() for _ in range(8)] + [response_key() for _ in range(3)]
    waiting, foreign = request_key(), "results/thesis.pt"
    for key in (*old, waiting, foreign):
        await brief.put(key, b"1")
    await lasting.sweep()
    for key in (old[0], old[-1]):
        assert await brief.get(key) == b"1"
    await time_passes_async(3)
    young, stored = result_key(), time.monotonic()
    await brief.put(young, b"2")
    await asyncio.gather(brief.sweep(), S3Store(address, 1.0).sweep(), brief.sweep())
    for key in old:
        assert await brief.get(key) is None
    for key in (waiting, foreign):
        assert await brief.get(key) == b"1"
    assert await brief.get(young) == b"2" or time.monotonic() - stored >= brief.ttl_s


@on_loop
async def test_sweeper_retries_while_store_is_unavailable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unreachable = f"http://127.0.0.1:{free_port()}"
    store = S3Store(S3Address(unreachable, unreachable, "a", "b"), 1.0, hurried_s=0.1)
    with caplog.at_level(logging.WARNING):
        await store.start()
        await eventually(lambda: len(caplog.messages) >= 2)
        await store.stop()
    assert unreachable in caplog.text


# A server that is unavailable or refuses


@on_loop
async def test_writes_wait_for_unavailable_store(s3: SwiftServer, address: S3Address) -> None:
    store = S3Store(address, LONG_S)
    await store.put(response_key(), b"{}")
    patient = S3Store(address, LONG_S, patience_s=PATIENCE_S, hurried_s=0.2)
    keys, content = [response_key(), result_key()], os.urandom(20 * MIB)
    with s3.away():
        storing = [
            asyncio.create_task(patient.put(keys[0], b"{}")),
            asyncio.create_task(filled(patient, content).commit(keys[1])),
            # The stored results were never counted, or too long ago.
            asyncio.create_task(patient.room.admit(str(uuid.uuid4()), "ada", 100)),
        ]
        await time_passes_async(2)  # longer than urgent operations wait
        assert not any(task.done() for task in storing)
    assert (await asyncio.gather(*storing))[-1] is None
    assert [await store.get(key) for key in keys] == [b"{}", content]


@on_loop
async def test_store_that_stays_unavailable_is_an_error(
    s3: SwiftServer, address: S3Address
) -> None:
    store = S3Store(address, LONG_S, patience_s=1, hurried_s=0.5)
    away = rf"^the object store at {re.escape(s3.url)} cannot be reached: "
    with s3.away():
        upload = filled(store, bytes(20 * MIB))
        for failing in (
            store.get(result_key()),
            store.put(result_key(), b"1"),
            store.put(result_key(), b"1", soon=True),
            upload.commit(result_key()),
            store.delete(result_key()),
            store.sweep(),
        ):
            with pytest.raises(ObjectStoreError, match=away):
                await failing
        upload.discard()


@on_loop
async def test_urgent_operations_do_not_wait_for_silent_store(
    s3: SwiftServer, address: S3Address
) -> None:
    store = S3Store(address, LONG_S, hurried_s=0.5)
    s3.pause()
    try:
        asked = store.get(result_key()), store.put(result_key(), b"1", soon=True), store.ping()
        for failing in asked:
            with pytest.raises(ObjectStoreError, match="does not answer in time"):
                await failing
    finally:
        s3.resume()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"secret_key": "wrong"}, "refuses .SignatureDoesNotMatch: .*NDIF_OBJECT_STORE_SECRET_KEY"),
        (
            {"access_key": "nobody"},
            "refuses .(InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied)",
        ),
        ({"region": "mars-1"}, "refuses .AuthorizationHeaderMalformed: .*region"),
        ({"bucket": "Not_A_Bucket"}, "refuses .InvalidBucketName"),
        ({"url": "http://no.such.host.invalid"}, "cannot be reached: .*not known"),
        ({"url": "https://127.0.0.1:{port}"}, "cannot be reached: "),
    ],
    ids=["secret", "access", "region", "bucket", "host", "tls"],
)
@on_loop
async def test_wrong_s3_settings_are_reported_in_one_line(
    s3: SwiftServer, address: S3Address, wrong: dict[str, str], expected: str
) -> None:
    wrong = {name: value.format(port=s3.port) for name, value in wrong.items()}
    store = S3Store(dataclasses.replace(address, **wrong), LONG_S, patience_s=0.5, hurried_s=0.5)
    with pytest.raises(ObjectStoreError, match=expected) as raised:
        await store.put(result_key(), b"1")
    text = str(raised.value)
    assert text.startswith("the object store at http")
    assert "\n" not in text
    assert "<" not in text
    assert len(text) < 400


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a self-signed certificate for localhost."""
    file = tmp_path_factory.mktemp("tls") / "localhost.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost", "-days", "2"),
            *("-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=CA:FALSE"),
            *("-keyout", str(file.with_suffix(".key")), "-out", str(file)),
        ],
        check=True,
        capture_output=True,
    )
    return file


class TlsInFront:
    """A proxy in front of a store that terminates TLS."""

    def __init__(self, certificate: Path, port: int) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        self._behind = port

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(
            self._pass, "localhost", 0, ssl=self._context, family=socket.AF_INET
        )
        return f"https://localhost:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._behind)
        await asyncio.gather(pump(reader, behind_writer), pump(behind_reader, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@on_loop
async def test_certificate_is_verified_unless_disabled(
    s3: SwiftServer, address: S3Address, certificate: Path
) -> None:
    async with TlsInFront(certificate, s3.port) as url:
        stores = [
            S3Store(
                dataclasses.replace(address, url=url, public_url=url, verify=verify),
                LONG_S,
                patience_s=0.5 if verify is True else PATIENCE_S,
            )
            for verify in (True, False, certificate)
        ]
        key, content = result_key(), os.urandom(20 * MIB)
        with pytest.raises(
            ObjectStoreError, match=r"not trusted .UnknownIssuer.; see NDIF_OBJECT_STORE_VERIFY"
        ):
            await stores[0].put(key, b"1")
        for store in stores[1:]:
            await store.put(key, content)
            assert await store.get(key) == content
            await store.delete(key)


def test_unreadable_certificate_file_is_reported(address: S3Address, tmp_path: Path) -> None:
    for file in (tmp_path / "missing.pem", tmp_path / "nonsense.pem"):
        if file.stem == "nonsense":
            file.write_text("no certificate")
        with pytest.raises(ObjectStoreError, match=r"cannot be used"):
            S3Store(dataclasses.replace(address, verify=file), LONG_S)


# Objects that are being replaced


@on_loop
async def test_object_being_replaced_is_read_again(
    address: S3Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key = S3Store(address, LONG_S), response_key()
    await store.put(response_key(), b"has the bucket made")

    async def is_replaced(for_s: float) -> None:
        assert for_s == s3_module._REPLACING_S
        await store.put(key, b"here")

    monkeypatch.setattr(s3_module, "asyncio", SimpleNamespace(sleep=is_replaced))
    assert await store.get(key) == b"here"
