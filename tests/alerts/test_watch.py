"""The alert watch with real destinations and a real state file: digests, restarts and its own failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ndif.alerts import digest, watch
from ndif.alerts.causes import Cause
from ndif.alerts.incidents import Incident, Member, SavedBook
from ndif.alerts.watch import Alerts, SavedAlerts, counted, open_alerts
from ndif.config.settings import Settings
from ndif.schema.answer import from_plain
from ndif.schema.job_record import JobRecord
from ndif.schema.server_state import Problem, QueueWait, ServerState
from ndif.schema.server_state import ProblemKind as Kind
from ndif.stores.broker import BrokerError
from ndif.stores.broker.signing import Signer
from ndif.stores.events import EventLog
from ndif.stores.leader import SharedCache
from ndif.stores.persisted_state import ALERTS, SharedState, StateFile
from ndif.stores.redis import connect
from ndif.stores.usage import MemoryUsage
from ndif.tasks import end
from ndif.telemetry import metrics
from ndif.telemetry.model_labels import OTHER
from tests.alerts.receivers import Receiver, receiving
from tests.alerts.states import status, waits
from tests.on_loop import on_loop
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import eventually, time_passes_async


class Site:
    """A server's state as the watch sees it."""

    def __init__(self, receiver: Receiver, folder: Path, **values: Any) -> None:
        self.document = status()
        self.is_away = False
        self.usage = MemoryUsage()
        self.file = folder / "alerts.json"
        self._folder = folder
        self._settings = Settings(
            alert_webhooks=receiver.url,  # type: ignore[arg-type]
            alert_after_s=0.1,
            **values,
        )

    async def ping(self) -> None:
        if self.is_away:
            raise BrokerError("it is away")

    async def look(self) -> tuple[ServerState, Sequence[Problem], Sequence[QueueWait]]:
        return from_plain(ServerState, self.document), [], waits()

    @property
    def saved(self) -> dict[str, Any]:
        """The state that the next process finds."""
        if self.file.exists():
            state: dict[str, Any] = json.loads(self.file.read_text())
            return state
        return {"incidents": {"open": []}, "messages": {}, "digest_day": None}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Alerts]:
        self.log = EventLog()
        running_alerts = open_alerts(
            self._settings,
            StateFile(self._folder, ALERTS, SavedAlerts),
            {"broker": self.ping},
            self._folder,
        )
        running = asyncio.create_task(running_alerts.run(self.look, self.usage, self.log))
        try:
            yield running_alerts
        finally:
            await end([running])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.02)


def events(receiver: Receiver) -> list[str]:
    return [body["event"] for body in receiver.taken]


@on_loop
async def test_restart_keeps_open_incidents_and_undelivered_messages(tmp_path: Path) -> None:
    with receiving() as receiver:
        site = Site(receiver, tmp_path)
        site.is_away = True
        async with site.watching() as alerts:
            await eventually(lambda: events(receiver) == ["opened"])
            assert len(alerts.describe().open) == 1
            receiver.status = 503
            site.is_away = False
            await eventually(lambda: receiver.asked > 1)  # "resolved" is refused for now
        saved = json.loads(site.file.read_text())
        assert (saved["incidents"]["open"], len(saved["messages"])) == ([], 1)
        assert site.file.stat().st_mode & 0o077 == 0
        receiver.status = 200
        async with site.watching() as alerts:
            await eventually(lambda: len(receiver.taken) == 2)
            await eventually(lambda: not json.loads(site.file.read_text())["messages"])
            assert [incident.kind for incident in alerts.describe().resolved] == ["store-away"]
    opened, resolved = receiver.taken
    assert resolved["event"] == "resolved"
    assert resolved["incident"]["id"] == opened["incident"]["id"]


@on_loop
async def test_incident_that_ends_during_downtime_is_resolved_after_restart(tmp_path: Path) -> None:
    with receiving() as receiver:
        site = Site(receiver, tmp_path)
        site.is_away = True
        async with site.watching():
            # Wait until the sender records the delivery; otherwise a restart would send the message again.
            await eventually(lambda: site.saved["incidents"]["open"] and not site.saved["messages"])
        site.is_away = False
        async with site.watching():
            await eventually(lambda: events(receiver) == ["opened", "resolved"])
            (noted,) = site.log.latest()
            assert (noted.kind, noted.by) == ("alert resolved", "server")
            assert "broker" in noted.subject


@on_loop
async def test_digest_is_sent_once_a_day_across_leaders(tmp_path: Path) -> None:
    with receiving() as receiver:
        past = datetime.now() - timedelta(minutes=1)
        site = Site(receiver, tmp_path, alert_digest_at=f"{past:%H:%M}")
        # A new server sends its first digest on the next day.
        async with site.watching():
            await eventually(site.file.exists)
        assert receiver.taken == []
        state = json.loads(site.file.read_text())
        site.file.write_text(json.dumps({**state, "digest_day": "2020-01-01"}))
        for _ in range(2):
            async with site.watching():
                await eventually(lambda: receiver.taken)
                await eventually(
                    lambda: site.saved["digest_day"] != "2020-01-01" and not site.saved["messages"]
                )
                await time_passes_async(0.2)
        (sent,) = receiver.taken
        assert (sent["event"], sent["headline"], sent["incident"]) == (
            "digest",
            "The last day",
            None,
        )
        assert "Jobs: none ended." in sent["text"]


@on_loop
async def test_watch_survives_broken_state_file_and_failed_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving() as receiver:
        site = Site(receiver, tmp_path)
        site.file.write_text("{")
        right, site.document = site.document, {}
        async with site.watching():
            await eventually(lambda: "a check for alerts failed" in caplog.text)
            site.document, site.is_away = right, True
            await eventually(lambda: receiver.taken)
    assert "the saved alerts are lost" in caplog.text
    assert [
        r for r in caplog.records if r.levelno == logging.WARNING and "Alert: " in r.getMessage()
    ]


@pytest.mark.engine
@on_loop
async def test_next_leader_loads_alert_state_from_redis(redis: RedisServer) -> None:
    redis.command("flushall")
    clients = [connect(redis.url) for _ in range(2)]
    first, second = (
        SharedState(SharedCache(client, SIGNER), ALERTS, SavedAlerts) for client in clients
    )
    state = SavedAlerts(SavedBook((), ()), {"a machine": 3600.0}, None, {})
    try:
        assert await first.load() is None
        await first.save(state)
        assert await second.load() == state
        # The state outlives processes.
        assert int(redis.command("ttl", "alerts")) > 6 * 24 * 3600
        # A server with another secret starts with empty state.
        other = SharedCache(clients[1], Signer(["another secret of tests"]))
        assert await SharedState(other, ALERTS, SavedAlerts).load() is None
    finally:
        for client in clients:
            await client.aclose()


def test_events_are_counted_by_model() -> None:
    before = counted()
    metrics.JOBS.labels("org/counted", "COMPLETED").inc(3)
    metrics.JOBS.labels("org/counted", "ERROR").inc(2)
    metrics.LOST_REPLICAS.labels("org/counted").inc()
    metrics.EVICTIONS.labels("org/counted", "disk").inc()
    metrics.EVICTIONS.labels("org/counted", "cpu").inc()
    now = counted()
    assert "org/counted" not in before.ended
    sums = (now.ended, now.failed, now.lost, now.evicted)
    assert [row["org/counted"] for row in sums] == [5, 2, 1, 2]


def test_jobs_for_models_never_loaded_here_are_no_cause() -> None:
    metrics.JOBS.labels(OTHER, "ERROR").inc(20)
    now = counted()
    assert OTHER not in {*now.ended, *now.failed}


# The digest's text


def job(model: str, status: str, waited_s: float, ended: float, now: float) -> JobRecord:
    received = now - ended - waited_s - 2
    return JobRecord(
        *("id", "user", "", model, "0.8", status, received, received + waited_s),
        *(now - ended, 1.5, 10),
    )


def test_digest_lists_jobs_models_waits_incidents_and_disk() -> None:
    now = time.time()
    jobs = [
        *(job("org/a", "COMPLETED", 1, 60, now) for _ in range(7)),
        *(job("org/b", "ERROR", 90, 120, now) for _ in range(2)),
        job("org/old", "ERROR", 5000, 25 * 3600, now),
    ]
    member = Member(Cause(Kind.DISK, "results", "5 % of the disk is free.", now - 900), now - 700)
    over = Incident("a", Kind.DISK, now - 900, (member,), now, frozenset(), now - 600)
    still = Incident("b", Kind.STORE_AWAY, now - 60, (member,), now, frozenset())
    ancient = Incident("c", Kind.DISK, 0.0, (member,), now, frozenset(), 1.0)
    day = digest.Day(now, jobs, (ancient, over, still), now - 7200, (1 << 30, 4 << 30))
    assert digest.lines(day) == [
        "Jobs: 9 ended: 7 COMPLETED, 2 ERROR.",
        "• org/a: 7 jobs, 0 of them failed, 10.5s of execution",
        "• org/b: 2 jobs, 2 of them failed, 3s of execution",
        "Longest waits: 1m 30s (org/b), 1s (org/a).",
        "Incidents: 2.",
        "• The disk of results is nearly full, over after 5m: 5 % of the disk is free.",
        "• A store does not answer, open for 1m: 5 % of the disk is free.",
        "This process has been the leader for 2h.",
        "Disk of results: 1GiB of 4GiB free.",
    ]
    none = digest.Day(now, None, (), now, None)
    assert digest.lines(none)[:2] == ["Jobs: the job records cannot be read.", "Incidents: none."]


@pytest.mark.parametrize(
    ("hour", "last", "due"),
    [
        (7, "2026-11-24", False),
        (8, "2026-11-24", True),
        (23, "2026-11-24", True),
        (9, "2026-11-25", False),
    ],
)
def test_digest_is_due_after_its_hour_on_new_day(hour: int, last: str, due: bool) -> None:
    now = datetime(2026, 11, 25, hour)
    at = datetime(2026, 11, 25, 8).time()
    assert digest.is_due(now, at, last) is due
    # After the first start, the digest is due at the next such hour.
    assert digest.is_due(now, at, digest.first_mark(now, at)) is False

    def later(hours: int) -> datetime:
        return now + timedelta(hours=hours)

    assert digest.is_due(later(24 if hour >= 8 else 1), at, digest.first_mark(now, at))
