"""The contract of every form of `CallbackQueue`, and features of single forms."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ndif.schema.callback import Callback, callback_for
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.signing import Signer
from ndif.stores.callbacks import CallbackLimits, CallbackQueue, CallbackQueueError, SqliteCallbacks
from ndif.stores.callbacks.redis import RedisCallbacks
from ndif.stores.redis import connect
from ndif.tasks import within
from tests.on_loop import on_loop
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SECRET, SIGNER
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

Opening = Callable[..., AbstractAsyncContextManager[CallbackQueue]]


def in_a_file(folder: Path) -> Opening:
    @contextlib.asynccontextmanager
    async def opening(**limits: int) -> AsyncIterator[CallbackQueue]:
        queue = SqliteCallbacks(folder, CallbackLimits(**limits))
        yield queue
        await queue.stop()

    return opening


def on_redis(url: str) -> Opening:
    @contextlib.asynccontextmanager
    async def opening(**limits: int) -> AsyncIterator[CallbackQueue]:
        client = connect(url)
        queue = RedisCallbacks(client, SIGNER, CallbackLimits(**limits))
        yield queue
        await queue.stop()
        await client.aclose()

    return opening


@pytest.fixture(params=["sqlite", "redis"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Opening:
    if request.param == "sqlite":
        return in_a_file(tmp_path / "callbacks")
    server: RedisServer = request.getfixturevalue("redis")
    server.command("flushall")
    return on_redis(server.url)


def a_request(**fields: Any) -> Request:
    address = fields.pop("callback", "https://example.org/done")
    return Request(
        ModelKey("a.B", "org/name"),
        "0.7",
        Wire.HEADERS,
        b"",
        False,
        "http://here",
        callback=address,
        key="a digest",
        **fields,
    )


def a_callback(due: float = 100.0, address: str = "https://example.org/done") -> Callback:
    request = a_request(callback=address)
    end = Response(request.id, Status.COMPLETED, "Done.")
    return replace(callback_for(request, end, 50.0), due=due)


@on_loop
async def test_callback_is_due_at_its_time_unchanged(opening: Opening) -> None:
    async with opening() as queue:
        later, sooner = a_callback(200.5), a_callback(100.25)
        for item in (later, sooner):
            await queue.add(item)
        assert await queue.due(100.0, 10) == []
        assert await queue.due(150.0, 10) == [sooner]
        assert await queue.due(201.0, 10) == [sooner, later]
        assert await queue.due(201.0, 1) == [sooner]
        assert await queue.counts() == (2, 0)


@on_loop
async def test_next_process_finds_added_callbacks(opening: Opening) -> None:
    callback = a_callback()
    async with opening() as queue:
        await queue.add(callback)
    async with opening() as queue:
        assert await queue.due(1000.0, 10) == [callback]
        await queue.remove(callback.request_id)
    async with opening() as queue:
        assert await queue.due(1000.0, 10) == []
        assert await queue.counts() == (0, 0)


@on_loop
async def test_another_end_of_the_same_job_replaces_the_first(opening: Opening) -> None:
    async with opening() as queue:
        first = a_callback()
        second = replace(first, content=replace(first.content, status="ERROR"), due=120.0)
        for item in (first, second):
            await queue.add(item)
        assert await queue.due(1000.0, 10) == [second]
        assert await queue.counts() == (1, 0)


@on_loop
async def test_busy_host_does_not_delay_others(opening: Opening) -> None:
    async with opening() as queue:
        slow = [a_callback(float(due), "http://slow.example/") for due in range(700)]
        for item in slow:
            await queue.add(item)
        quick, mail = a_callback(900.0), a_callback(901.0, "ada@example.org")
        for item in (quick, mail):
            await queue.add(item)
        assert await queue.due(1000.0, 3, ["slow.example"]) == [quick, mail]
        assert await queue.due(1000.0, 3, ["slow.example", ""]) == [quick]
        assert await queue.due(1000.0, 3) == slow[:3]


@on_loop
async def test_failed_callback_is_not_due_and_is_listed_first(opening: Opening) -> None:
    async with opening() as queue:
        waits, dead = a_callback(100.0), a_callback(110.0)
        for item in (waits, dead):
            await queue.add(item)
        dead = replace(dead, dead=True, due=300.0, attempts=10, problem="it answered 500")
        await queue.update(dead)
        assert await queue.due(1000.0, 10) == [waits]
        assert await queue.all(10) == [dead, waits]
        assert await queue.all(1) == [dead]
        assert await queue.counts() == (1, 1)
        assert await queue.find(dead.request_id[:13]) == [dead]
        assert await queue.find("%") == await queue.find("*") == []
        await queue.update(replace(dead, dead=False, attempts=0))
        assert await queue.counts() == (2, 0)


@on_loop
async def test_failed_callbacks_are_forgotten_by_number_and_age(opening: Opening) -> None:
    async with opening(dead=3) as queue:
        for due in range(5):
            await queue.update(replace(a_callback(float(due)), dead=True))
        assert [item.due for item in await queue.all(10)] == [2.0, 3.0, 4.0]
        waits = a_callback(1.0)
        await queue.add(waits)
        await queue.forget_dead(4.0)
        assert [item.due for item in await queue.all(10)] == [4.0, 1.0]
        assert await queue.counts() == (1, 1)


@on_loop
async def test_full_callback_queue_rejects_callbacks(opening: Opening) -> None:
    async with opening(waiting=2) as queue:
        callbacks = [a_callback() for _ in range(3)]
        for item in callbacks[:2]:
            await queue.add(item)
        with pytest.raises(CallbackQueueError, match="2 webhooks and mails wait already"):
            await queue.add(callbacks[2])
        await queue.update(replace(callbacks[0], attempts=1))
        assert await queue.counts() == (2, 0)


@on_loop
async def test_waiting_callbacks_are_counted_per_user(opening: Opening) -> None:
    async with opening() as queue:
        hers = [replace(a_callback(), user="ada lovelace") for _ in range(3)]
        for item in (*hers, replace(a_callback(), user="bob")):
            await queue.add(item)
        await queue.update(replace(hers[0], attempts=1))
        assert [await queue.waiting_of(user) for user in ("ada lovelace", "bob", "c")] == [3, 1, 0]
        await queue.remove(hers[0].request_id)
        await queue.update(replace(hers[1], dead=True))
        assert await queue.waiting_of("ada lovelace") == 1
        await queue.update(hers[1])
        await queue.remove(hers[2].request_id)
        assert await queue.waiting_of("ada lovelace") == 1


@on_loop
async def test_waiting_callbacks_per_user_are_limited(opening: Opening) -> None:
    async with opening(of_user=2) as queue:
        for _ in range(2):
            await queue.add(replace(a_callback(), user="ada"))
        with pytest.raises(
            CallbackQueueError, match="2 webhooks and mails of its user wait already"
        ):
            await queue.add(replace(a_callback(), user="ada"))
        await queue.add(replace(a_callback(), user="bob"))
        assert await queue.counts() == (3, 0)


@on_loop
async def test_wait_returns_in_time_or_at_new_callback(opening: Opening) -> None:
    async with opening() as queue:
        await within(queue.wait(0.01), PATIENCE_S)
        await queue.add(a_callback())
        await within(queue.wait(2 * PATIENCE_S), PATIENCE_S)


# A file


@on_loop
async def test_callback_file_survives_killed_process(tmp_path: Path) -> None:
    callback = a_callback()
    async with in_a_file(tmp_path / "a")() as queue:
        await queue.add(callback)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    async with in_a_file(tmp_path / "b")() as queue:
        assert await queue.due(1000.0, 10) == [callback]


@on_loop
async def test_second_process_cannot_open_callback_file(tmp_path: Path) -> None:
    async with in_a_file(tmp_path)():
        with pytest.raises(CallbackQueueError, match="another server has the webhooks and mails"):
            SqliteCallbacks(tmp_path)


@on_loop
async def test_callback_files_are_readable_only_by_owner(tmp_path: Path) -> None:
    async with in_a_file(tmp_path / "callbacks")() as queue:
        await queue.add(a_callback())
        modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "callbacks").iterdir()}
    assert modes == {0}


@on_loop
async def test_damaged_callback_is_forgotten(tmp_path: Path) -> None:
    queue = SqliteCallbacks(tmp_path)
    whole, damaged = a_callback(1.0), a_callback(2.0)
    for item in (whole, damaged):
        await queue.add(item)
    values = (b"{", damaged.request_id)
    await queue._file.write(("UPDATE callback SET content = ? WHERE id = ?", values))
    assert await queue.due(1000.0, 10) == [whole]
    assert await queue.counts() == (1, 0)
    await queue.stop()


# Redis


@on_loop
async def test_forged_callbacks_in_redis_are_ignored(redis: RedisServer) -> None:
    redis.command("flushall")
    client = connect(redis.url)
    ours = RedisCallbacks(client, SIGNER)
    theirs = RedisCallbacks(client, Signer(["another secret of 16 characters"]))
    forged, true = a_callback(), a_callback()
    await theirs.add(forged)
    await ours.add(true)
    # An entry moved to another entry's place counts as forged, too.
    moved = a_callback()
    content = await client.hget("callbacks:contents", true.request_id)  # type: ignore[misc]
    await client.hset("callbacks:contents", moved.request_id, content)  # type: ignore[misc]
    await client.zadd("callbacks:waiting", {f"{moved.request_id} example.org": 1})
    assert await ours.due(1000.0, 10) == [true]
    assert await ours.counts() == (1, 0)
    await client.aclose()


@on_loop
async def test_callbacks_are_readable_during_secret_rotation(redis: RedisServer) -> None:
    redis.command("flushall")
    client = connect(redis.url)
    callback = a_callback()
    await RedisCallbacks(client, SIGNER).add(callback)
    renewed = RedisCallbacks(client, Signer(["the next secret of the server", SECRET]))
    assert await renewed.due(1000.0, 10) == [callback]
    await client.aclose()


def test_callback_content_describes_job() -> None:
    request = a_request(received=1000.0)
    waiting = callback_for(request, Response(request.id, Status.ERROR, "x" * 5000), 1009.5)
    assert {**json.loads(waiting.content.encode()), "description": ""} == {
        "id": request.id,
        "status": "ERROR",
        "model": "org/name",
        "times": {"received": 1000.0, "ended": 1009.5},
        "description": "",
        "url": f"http://here/response/{request.id}",
    }
    assert len(waiting.content.description) == 2000
    assert (waiting.created, waiting.due, waiting.key, waiting.polled) == (
        1009.5,
        1009.5,
        "a digest",
        True,
    )
    live = callback_for(a_request(subscription_id="s"), Response("", Status.COMPLETED), 1.0)
    assert "url" not in json.loads(live.content.encode())
    assert not live.polled


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("post+https://Example.org:8443/x", "example.org"),
        ("http://[::1]/", "::1"),
        ("http://EXAMPLE.org./", "example.org"),
        ("ada@example.org", ""),
        ("http://[", ""),
    ],
)
def test_host_of_callback_is_parsed(address: str, host: str) -> None:
    assert a_callback(address=address).host == host
