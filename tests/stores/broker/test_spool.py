"""The spool: its files after a process was killed, and damaged or full disks."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndif.config.settings import Settings
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.server.leader import LeaderCandidate
from ndif.server.process_config import ProcessConfig
from ndif.stores.broker import BrokerError, MemoryBroker
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.spool import SPOOL, Spool, SpoolError
from ndif.stores.objects import DiskError, FileStore
from ndif.stores.responder import Responder, last_response
from tests.on_loop import on_loop
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SECRET, SIGNER
from tests.stores.small_disk import fill, small_disk
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

__all__ = ["small_disk"]

SMALL, LARGE = b"opaque", bytes(range(256)) * 1024
"""Payloads that are stored in the common file and in a separate file."""


def a_request(payload: bytes = SMALL, subscription_id: str | None = None) -> Request:
    return Request(
        ModelKey("a.B", "org/name"),
        "0.8",
        Wire.ENVELOPE,
        payload,
        False,
        "http://here",
        subscription_id=subscription_id,
        user="somebody",
        key="a digest",
        trusted=True,
    )


def as_killed(folder: Path, name: str) -> Path:
    """Return a copy of the current files, which no process has open."""
    return Path(shutil.copytree(folder, folder.with_name(name)))


@asynccontextmanager
async def opened(folder: Path, objects: FileStore, **present: object) -> AsyncIterator[Spool]:
    spool = Spool(folder, objects, present)
    yield spool
    await spool.close()


@pytest.fixture
def objects(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "objects", 60)


async def ids(folder: Path, objects: FileStore) -> list[str]:
    async with opened(folder, objects) as spool:
        return [entry.request.id for entry in await spool.unfinished()]


async def stored(objects: FileStore, request: Request) -> dict[str, Any]:
    """Return the response that a client of the request receives."""
    response = await last_response(objects, request.id)
    assert response is not None
    return response.fields


@on_loop
async def test_accepted_requests_survive_killed_process(tmp_path: Path, objects: FileStore) -> None:
    async with opened(tmp_path / "spool", objects) as spool:
        sent = [a_request(), a_request(LARGE), a_request()]
        for request in sent:
            await spool.add(request)
        spool.note_attempts(sent[1].id, 1)
        await asyncio.gather(*spool._notes)
        left = as_killed(tmp_path / "spool", "left")
    async with opened(left, objects) as spool:
        entries = await spool.unfinished()
        again = [
            replace(entry.request, payload=await spool.payload(entry.request.id))
            for entry in entries
        ]
        assert again == sent
        assert [entry.size for entry in entries] == [len(SMALL), len(LARGE), len(SMALL)]
        assert [entry.request.attempts for entry in entries] == [0, 1, 0]
    async with opened(left, objects, trusted=False) as spool:
        assert not any(entry.request.trusted for entry in await spool.unfinished())


@on_loop
async def test_concurrent_requests_are_written_in_few_commits(
    tmp_path: Path, objects: FileStore
) -> None:
    async with opened(tmp_path / "spool", objects) as spool:
        groups = []
        commit = spool._file._commit
        spool._file._commit = lambda group: (groups.append(len(group)), commit(group))[1]  # type: ignore[method-assign]
        await asyncio.gather(*(spool.add(a_request()) for _ in range(100)))
    assert sum(groups) == 100
    assert len(groups) <= 3


@pytest.mark.parametrize("payload", [SMALL, LARGE])
@pytest.mark.parametrize("is_written", [True, False])
@on_loop
async def test_request_cancelled_while_written_does_not_run(
    tmp_path: Path, objects: FileStore, payload: bytes, is_written: bool
) -> None:
    """A stopping server cancels pending work, and reports that to the client."""
    spool = Spool(tmp_path / "spool", objects)
    broker = MemoryBroker(max_bytes=len(LARGE), spool=spool)
    commit, writing, may_end = spool._file._commit, threading.Event(), threading.Event()

    def slowly(group: list[Any]) -> None:
        if is_written:
            commit(group)
        writing.set()
        may_end.wait(PATIENCE_S)
        if not is_written:
            commit(group)

    spool._file._commit = slowly  # type: ignore[method-assign]
    submitting = asyncio.create_task(broker.submit(a_request(payload)))
    await asyncio.to_thread(writing.wait, PATIENCE_S)
    submitting.cancel()
    await asyncio.wait([submitting])
    assert submitting.cancelled()
    may_end.set()
    kept = a_request(LARGE)
    await broker.submit(kept)  # the other request takes no space any more
    await broker.stop()
    assert await ids(tmp_path / "spool", objects) == [kept.id]
    assert len([*(tmp_path / "spool").iterdir()]) == 2


@on_loop
async def test_request_with_stored_end_does_not_run_again(
    tmp_path: Path, objects: FileStore
) -> None:
    """A process was killed between storing an end and removing its request."""
    async with opened(tmp_path / "spool", objects) as spool:
        ended, torn, waits = a_request(LARGE), a_request(), a_request()
        for request in (ended, torn, waits):
            await spool.add(request)
        end = json.dumps({"id": ended.id, "status": "COMPLETED", "description": ""})
        await objects.put(f"ends/{ended.id}.json", end.encode())
        await objects.put(f"ends/{torn.id}.json", b"")  # like after a power loss
        left = as_killed(tmp_path / "spool", "left")
    broker = MemoryBroker(spool=Spool(left, objects))
    await broker.start()
    await Responder(broker, objects).resume(broker.unfinished)
    assert [(await broker.claim()).id for _ in range(2)] == [torn.id, waits.id]
    kept = [await stored(objects, job_id) for job_id in (ended, torn, waits)]
    assert [status["status"] for status in kept] == ["COMPLETED", "QUEUED", "QUEUED"]
    for request in (torn, waits):
        await objects.put(f"ends/{request.id}.json", end.encode())
        await broker.complete(request, Response(request.id, Status.COMPLETED))
    await broker.stop()
    assert await ids(left, objects) == []
    assert not (left / ended.id).exists()


@on_loop
async def test_polling_client_is_notified_of_lost_job(tmp_path: Path, objects: FileStore) -> None:
    """These are jobs of a server without a spool or with a damaged spool."""
    lost, ended = a_request(), a_request()
    responder = Responder(MemoryBroker(), objects)
    await responder.respond(lost, Response(lost.id, Status.RUNNING))
    for status in (Status.RUNNING, Status.COMPLETED):
        await responder.respond(ended, Response(ended.id, status))
    await responder.resume([])
    kept = [await stored(objects, job_id) for job_id in (lost, ended)]
    assert [status["status"] for status in kept] == ["ERROR", "COMPLETED"]
    assert "Send it again" in kept[0]["description"]


@on_loop
async def test_torn_last_write_loses_only_itself(tmp_path: Path, objects: FileStore) -> None:
    async with opened(tmp_path / "spool", objects) as spool:
        sent = [a_request(bytes(3000)) for _ in range(4)]
        for request in sent:
            await spool.add(request)
        for lost in (1, 2000, 5000):
            left = as_killed(tmp_path / "spool", f"left {lost}")
            wal = left / "spool.sqlite-wal"
            content = wal.read_bytes()
            wal.write_bytes(content[:-lost])
            found_ids = await ids(left, objects)
            assert found_ids == [job.id for job in sent][: len(found_ids)]
            assert len(found_ids) in (2, 3)


@on_loop
async def test_damaged_spool_is_set_aside(tmp_path: Path, objects: FileStore) -> None:
    folder = tmp_path / "spool"
    async with opened(folder, objects) as spool:
        for _ in range(50):
            await spool.add(a_request(bytes(3000)))
    whole = (folder / "spool.sqlite").read_bytes()
    for damaged in (b"not a database" * 500, whole[:8192] + bytes(range(256)) * 40 + whole[20000:]):
        (folder / "spool.sqlite").write_bytes(damaged)
        async with opened(folder, objects) as spool:
            assert await spool.unfinished() == []
            await spool.add(a_request())
    aside = [path for path in folder.iterdir() if "damaged" in path.name]
    assert aside


@on_loop
async def test_second_server_cannot_open_same_spool(tmp_path: Path, objects: FileStore) -> None:
    async with opened(tmp_path / "spool", objects):
        with pytest.raises(SpoolError, match="another server has the jobs in"):
            Spool(tmp_path / "spool", objects)
    assert await ids(tmp_path / "spool", objects) == []


@on_loop
async def test_leader_moves_spooled_requests_to_broker(tmp_path: Path, redis: RedisServer) -> None:
    results = tmp_path / "results"
    objects = FileStore(results, 60)
    sent = [a_request(), a_request(LARGE)]
    async with opened(results / SPOOL, objects) as spool:
        for request in sent:
            await spool.add(request)
        spool.note_attempts(sent[1].id, 1)
    config = ProcessConfig(0, results, "secret", "token", "127.0.0.1", (), cluster_secrets=[SECRET])
    leader = LeaderCandidate(Settings(broker_url=redis.url), config)
    await leader.stores.broker.client.flushall()
    await leader.stores.broker.start()
    for _ in range(2):  # the second call finds nothing
        await leader.take_spooled()
    claimed = [await leader.stores.broker.claim() for _ in sent]
    assert [replace(c, payload=await leader.stores.broker.payload(c)) for c in claimed] == sent
    assert [job.attempts for job in claimed] == [0, 1]
    inherited = RedisBroker(redis.url, objects, SIGNER, inline_bytes=1, counts_attempts=True)
    assert [(await inherited.claim()).attempts for _ in sent] == [0, 1]
    await inherited.stop()
    assert await leader.stores.broker.client.xlen("queue") == 2
    assert await ids(results / SPOOL, objects) == []
    await leader.stores.broker.stop()


@on_loop
async def test_live_requests_are_not_spooled(tmp_path: Path, objects: FileStore) -> None:
    broker = MemoryBroker(spool=Spool(tmp_path / "spool", objects))
    await broker.start()
    live, polled = a_request(subscription_id="somebody's"), a_request()
    for request in (live, polled):
        await broker.submit(request)
    assert [broker.outlives(job) for job in (live, polled)] == [False, True]
    left = as_killed(tmp_path / "spool", "left")
    assert await ids(left, objects) == [polled.id]
    await broker.stop()


# A full disk


@on_loop
async def test_full_disk_rejects_requests_and_loses_nothing(small_disk: Path) -> None:
    objects = FileStore(small_disk / "objects", 60)
    broker = MemoryBroker(spool=Spool(small_disk / "spool", objects))
    await broker.start()
    responder = Responder(broker, objects)
    first = a_request()
    await broker.submit(first)
    await responder.respond(first, Response(first.id, Status.QUEUED))
    assert objects.problem() is None
    filling = fill(small_disk)
    assert "The disk of" in (objects.problem() or "")
    assert " is full: " in (objects.problem() or "")
    for payload in (SMALL * 1000, LARGE):
        with pytest.raises(BrokerError, match="the server's disk is full"):
            await broker.submit(a_request(payload))
    with pytest.raises(DiskError, match="the server's disk is full"):
        await responder.respond(first, Response(first.id, Status.COMPLETED))
    assert not await broker.is_complete(first)
    assert await broker.payload(first) == SMALL
    filling.unlink()
    second = a_request(LARGE)
    await broker.submit(second)
    await responder.respond(first, Response(first.id, Status.COMPLETED))
    await broker.stop()
    assert await ids(small_disk / "spool", objects) == [second.id]
