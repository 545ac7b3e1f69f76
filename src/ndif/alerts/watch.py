"""The watch of a server: it checks the state every ten seconds, and notifies the operator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from datetime import time as time_of_day
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client import Counter

from ndif.alerts import digest, incidents
from ndif.alerts.causes import AlertLimits, Counts, Increases, ServerObservation, find, nodes_seen
from ndif.alerts.delivery import AlertDelivery, open_destinations
from ndif.alerts.incidents import Book, IncidentEvent, SavedBook, Timing
from ndif.alerts.messages import Message, about, described, digest_message, test_message
from ndif.config.settings import Settings
from ndif.schema.alerts import Alerts as AlertsAnswer
from ndif.schema.alerts import TestedAlerts
from ndif.schema.job_record import NO_ERRORS
from ndif.schema.server_state import Problem, QueueWait, ServerState
from ndif.stores.broker import BrokerError
from ndif.stores.disk import disk_usage
from ndif.stores.events import EventLog, Kind
from ndif.stores.persisted_state import SavedState
from ndif.stores.ping import Ping, ask
from ndif.stores.usage import UsageStore, UsageUnavailableError
from ndif.tasks import end, within
from ndif.telemetry import metrics
from ndif.telemetry.model_labels import OTHER

logger = logging.getLogger(__name__)

LOOK_S = 10.0
_PING_TIMEOUT_S = 4.0
"""Seconds in which a store must answer; less than `LOOK_S`."""
_STOP_S = 2.0
"""Maximum seconds for which a stopping server waits for its alerts to be saved."""

_EVENT_KINDS: Mapping[IncidentEvent, Kind] = {
    IncidentEvent.OPENED: "alert opened",
    IncidentEvent.RESOLVED: "alert resolved",
}

Look = Callable[[], Awaitable[tuple[ServerState, Sequence[Problem], Sequence[QueueWait]]]]
"""Returns the state of the server, its problems, and the waits of its queues."""


@dataclass(frozen=True, slots=True)
class SavedAlerts:
    """The state of alerts that a process saves for its successor."""

    incidents: SavedBook
    nodes: Mapping[str, float]
    """Unix time of the hour in which each node was last seen."""
    digest_day: str | None
    messages: Mapping[str, tuple[Message, ...]]
    """Waiting messages by the id of their destination."""


class Alerts:
    """The alerts of a server, in its leader.

    Owns the incidents, their messages and the daily digest. Reads the server's state and never changes it.
    """

    def __init__(
        self,
        settings: Settings,
        delivery: AlertDelivery,
        saved: SavedState[SavedAlerts],
        stores: Mapping[str, Ping],
        folder: Path,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare the watch, which `run` starts. `folder` holds the results; its disk is checked."""
        self._delivery = delivery
        self._saved = saved
        self._stores = stores
        self._folder = folder
        self._now = now
        self._server = urlsplit(settings.public_url).netloc or socket.gethostname()
        self._limits = AlertLimits(
            settings.alert_queue_s, settings.alert_error_rate, settings.alert_disk_free
        )
        self._timing = Timing(settings.alert_after_s, settings.alert_repeat_s)
        at = settings.alert_digest_at
        self._digest_at = time_of_day.fromisoformat(at) if at else None
        self._book = Book()
        self._nodes: dict[str, float] = {}
        self._digest_day: str | None = None
        self._counts = Increases()
        self._leads_since = now()
        self._is_loaded = False
        self._written: SavedAlerts | None = None
        self._saving = asyncio.Lock()
        self._events: EventLog | None = None

    async def run(self, look: Look, usage: UsageStore, events: EventLog | None = None) -> None:
        """Watch until cancelled; record opened and resolved incidents in `events`."""
        self._events = events
        self._leads_since = self._now()
        self._counts.record(self._now(), counted())
        tasks = [
            asyncio.create_task(self._delivery.run(), name="alerts' delivery"),
            asyncio.create_task(self._save_deliveries(), name="alerts that are delivered"),
        ]
        try:
            while True:
                # The first check is late enough to load the state that an earlier process saves at its end.
                await asyncio.sleep(LOOK_S)
                try:
                    await self._load()
                    await self._step(look)
                    await self._digest(usage)
                    await self._save()
                except Exception:
                    # One failure must not end the watch.
                    logger.exception("a check for alerts failed; the next one follows")
        finally:
            await end(tasks)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._save(), _STOP_S)

    def describe(self) -> AlertsAnswer:
        """Return the incidents and destinations as operators see them."""
        return AlertsAnswer(
            open=[described(incident) for incident in self._book.open],
            resolved=[described(incident) for incident in reversed(self._book.over)],
            destinations=self._delivery.describe(),
        )

    async def test(self) -> TestedAlerts:
        """Send a test message to every destination, and return the outcomes."""
        message = test_message(self._server, self._now())
        return TestedAlerts(destinations=await self._delivery.try_each(message))

    async def _step(self, look: Look) -> None:
        silences = await ask(self._stores, _PING_TIMEOUT_S)
        server, problems, waits = await look()
        now = self._now()
        self._counts.record(now, counted())
        observation = ServerObservation(
            now,
            server,
            problems,
            waits,
            {store: error is None for store, error in silences.items()},
            disk_usage(self._folder),
            self._nodes,
            self._counts,
        )
        self._book, notices = incidents.step(
            self._book, find(observation, self._limits), now, self._timing
        )
        self._nodes = nodes_seen(self._nodes, server, now)
        for notice in notices:
            message = about(notice, self._server, now)
            logger.warning("Alert: %s", message.headline)
            self._delivery.send(message)
            if self._events is not None and notice.event in _EVENT_KINDS:
                self._events.record(_EVENT_KINDS[notice.event], message.headline, "", "server")

    async def _digest(self, usage: UsageStore) -> None:
        if self._digest_at is None or not self._is_loaded:
            return
        now = self._now()
        local = datetime.fromtimestamp(now).astimezone()
        if self._digest_day is None:
            self._digest_day = digest.first_mark(local, self._digest_at)
        if not digest.is_due(local, self._digest_at, self._digest_day):
            return
        self._digest_day = digest.day_of(local)
        try:
            jobs = await usage.recent(None, digest.MOST_JOBS)
        except UsageUnavailableError as error:
            logger.warning("the digest has no jobs: %s", error)
            jobs = None
        past = (*self._book.over, *self._book.open)
        day = digest.Day(now, jobs, past, self._leads_since, disk_usage(self._folder))
        self._delivery.send(digest_message(self._server, now, digest.lines(day)))

    # State for the next process

    async def _load(self) -> None:
        """Take over the state of an earlier process, once the store of that state answers."""
        if self._is_loaded:
            return
        try:
            state = await self._saved.load()
        except BrokerError as error:
            logger.warning("the saved alerts cannot be loaded yet: %s", error)
            return
        self._is_loaded = True
        if state is not None:
            earlier = incidents.loaded(state.incidents, self._now())
            self._book = incidents.taken_over(self._book, earlier)
            self._nodes = {**state.nodes, **self._nodes}
            self._digest_day = state.digest_day
            self._delivery.take(state.messages)

    async def _save_deliveries(self) -> None:
        """Save at once that a message was delivered, so that the next process does not repeat it."""
        while True:
            await self._delivery.brought.wait()
            self._delivery.brought.clear()
            await self._save()

    async def _save(self) -> None:
        """Save the state for the next process, if it has changed."""
        async with self._saving:
            await self._save_state()

    async def _save_state(self) -> None:
        state = SavedAlerts(
            incidents.saved(self._book),
            # Rounded to the hour: exact times would change the state with every check.
            {name: last_seen // 3600 * 3600 for name, last_seen in self._nodes.items()},
            self._digest_day,
            self._delivery.waiting(),
        )
        if not self._is_loaded or state == self._written:
            return
        try:
            await self._saved.save(state)
        except (BrokerError, OSError) as error:
            logger.warning("the state of alerts is not saved yet: %s", error)
        else:
            self._written = state


def open_alerts(
    settings: Settings, saved: SavedState[SavedAlerts], stores: Mapping[str, Ping], folder: Path
) -> Alerts:
    """Return the alerts that the settings describe."""
    return Alerts(settings, AlertDelivery(open_destinations(settings)), saved, stores, folder)


def counted() -> Counts:
    """Return the events that this process has counted, by model, from its metrics.

    Jobs for models without a label of their own are left out.
    """
    ended: dict[str, float] = {}
    failed: dict[str, float] = {}
    for labels, value in _samples(metrics.JOBS):
        model = labels["model"]
        if model == OTHER:  # jobs for names that do not exist can only fail
            continue
        ended[model] = ended.get(model, 0.0) + value
        if labels["status"] not in NO_ERRORS:
            failed[model] = failed.get(model, 0.0) + value
    evicted: dict[str, float] = {}
    for labels, value in _samples(metrics.EVICTIONS):
        evicted[labels["model"]] = evicted.get(labels["model"], 0.0) + value
    lost = {labels["model"]: value for labels, value in _samples(metrics.LOST_REPLICAS)}
    return Counts(ended, failed, lost, evicted)


def _samples(counter: Counter) -> list[tuple[dict[str, str], float]]:
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return [(sample.labels, sample.value) for sample in samples if sample.name.endswith("_total")]
