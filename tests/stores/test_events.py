"""The event log: its bounds, and its recovery by the next process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ndif.stores import events
from ndif.stores.broker import BrokerError
from ndif.stores.broker.signing import Signer
from ndif.stores.events import MAX_EVENTS, MAX_FAILED_LOGINS, EventLog, SavedEvents
from ndif.stores.leader import SharedCache
from ndif.stores.persisted_state import EVENTS, SharedState, StateFile
from ndif.stores.redis import connect
from ndif.tasks import end
from tests.on_loop import on_loop
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import eventually

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SAVE_S", 0.01)


@contextlib.asynccontextmanager
async def running(log: EventLog) -> AsyncIterator[EventLog]:
    task = asyncio.create_task(log.run())
    await asyncio.sleep(0)  # the task starts
    try:
        yield log
    finally:
        await end([task])


def subjects(log: EventLog) -> list[str]:
    return [event.subject for event in log.latest()]


def test_last_events_are_kept_newest_first() -> None:
    log = EventLog()
    for n in range(MAX_EVENTS + 5):
        log.record("deployed", f"org/{n}", "", "token")
    assert subjects(log) == [f"org/{n}" for n in range(MAX_EVENTS + 4, 4, -1)]


def test_failed_logins_do_not_displace_other_events() -> None:
    log = EventLog(now=iter(range(10**6)).__next__)
    log.record("deployed", "org/a", "", "token")
    for n in range(2 * MAX_EVENTS):
        log.record("failed login", f"host {n}", "", "login")
    names = subjects(log)
    assert len(names) == MAX_FAILED_LOGINS + 1
    assert names[0] == f"host {2 * MAX_EVENTS - 1}"
    assert names[-1] == "org/a"
    log.record("failed login", "host 1999", "", "login")
    assert log.latest()[0].count == 2
    # After ten minutes it counts as another event.
    later = EventLog(now=iter((0.0, 1000.0)).__next__)
    later.record("failed login", "host", "", "login")
    later.record("failed login", "host", "", "login")
    assert [event.count for event in later.latest()] == [1, 1]


@on_loop
async def test_next_process_finds_saved_events(tmp_path: Path) -> None:
    file = tmp_path / "events.json"
    async with running(EventLog(StateFile(tmp_path, EVENTS, SavedEvents))) as log:
        log.record("deployed", "org/a", "", "token")
        await eventually(file.exists)
        assert file.stat().st_mode & 0o077 == 0
        log.record("deployed", "org/b", "", "token")  # and the process ends before the next save
    again = EventLog(StateFile(tmp_path, EVENTS, SavedEvents))
    again.record("started", "the server", "", "server")
    async with running(again):
        await eventually(lambda: len(subjects(again)) == 3)
    assert subjects(again) == ["the server", "org/b", "org/a"]
    saved = json.loads(file.read_text())["events"]
    assert [row["subject"] for row in saved] == ["org/a", "org/b", "the server"]


@on_loop
async def test_next_leader_finds_events_in_redis(redis: RedisServer) -> None:
    clients = [connect(redis.url) for _ in range(2)]
    try:
        first, second = (SharedState(SharedCache(c, SIGNER), EVENTS, SavedEvents) for c in clients)
        async with running(EventLog(first)) as log:
            log.record("deployed", "org/a", "", "token")
        async with running(EventLog(second)) as log:
            await eventually(lambda: subjects(log) == ["org/a"])
        # Events of a leader with another secret are ignored.
        other = SharedCache(clients[1], Signer(["another secret of tests"]))
        assert await SharedState(other, EVENTS, SavedEvents).load() is None
    finally:
        for client in clients:
            await client.aclose()


@on_loop
async def test_unavailable_store_loses_no_events(tmp_path: Path) -> None:
    class Away(StateFile[SavedEvents]):
        is_away = True

        async def load(self) -> SavedEvents | None:
            if self.is_away:
                raise BrokerError("it is away")
            return await super().load()

        async def save(self, state: SavedEvents) -> None:
            if self.is_away:
                raise OSError("the disk is full")
            await super().save(state)

    (tmp_path / "events.json").write_text("{")  # the file was damaged before
    store = Away(tmp_path, EVENTS, SavedEvents)
    async with running(EventLog(store)) as log:
        log.record("deployed", "org/a", "", "token")
        await asyncio.sleep(0.05)
        assert (tmp_path / "events.json").read_text() == "{"
        store.is_away = False
        await eventually(lambda: "org/a" in (tmp_path / "events.json").read_text())
