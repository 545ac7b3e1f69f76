"""The log of a server's events for its operators: changes, their authors and their times."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ndif.schema.answer import answer
from ndif.stores.broker import BrokerError
from ndif.tasks import within

if TYPE_CHECKING:
    from ndif.stores.persisted_state import SavedState

logger = logging.getLogger(__name__)

MAX_EVENTS = 1000
"""Maximum events that are kept."""
MAX_FAILED_LOGINS = 200
"""Maximum failed logins among them, so that guesses cannot push out all other events."""
SAVE_S = 1.0
"""Seconds between two saves of a log that changes."""
_JOIN_S = 600.0
"""Seconds in which failed logins from one address count as one event."""
_STOP_S = 2.0

Kind = Literal[
    "started",
    "stopped",
    "deployed",
    "evicted",
    "scaled",
    "restarted",
    "killed",
    "left",
    "key made",
    "key revoked",
    "keys imported",
    "tier made",
    "tier changed",
    "tier deleted",
    "tier given",
    "tier withdrawn",
    "call-backs retried",
    "expired deleted",
    "alerts tested",
    "login",
    "failed login",
    "logout",
    "booking begun",
    "booking over",
    "fetched",
    "alert opened",
    "alert resolved",
]


@answer()
class OperatorsEvent:
    """One event of an operator's log."""

    at: float
    """Unix time; for joined events, the time of the last one."""
    kind: str
    """Word for the event, such as `deployed` or `failed login`."""
    subject: str
    """Model, key, tier or address that the event concerns."""
    text: str
    """Sentence about the event; may be empty."""
    by: str
    """`login`, `command line`, `token`, `calendar`, `autoscaler` or `server`."""
    count: int
    """Number of joined events."""


def event(kind: Kind, subject: str, text: str, by: str, at: float | None = None) -> OperatorsEvent:
    """Return one event, by default of the current time."""
    at = time.time() if at is None else at
    return OperatorsEvent(at=at, kind=kind, subject=subject, text=text, by=by, count=1)


@dataclass(frozen=True, slots=True)
class SavedEvents:
    """The events that a process saves for its successor, the oldest first."""

    events: tuple[OperatorsEvent, ...]


RecordEvents = Callable[[Sequence[OperatorsEvent]], Awaitable[None]]
"""Passes events to the leader."""


class EventLog:
    """The last events of a server, in its leader.

    Owns their number and order, and saves them for the next process in a `SavedState`. Events are
    informational only: a log that cannot be saved has no other effect.
    """

    def __init__(
        self, saved: SavedState[SavedEvents] | None = None, now: Callable[[], float] = time.time
    ) -> None:
        """Start empty; without a `saved` state the log ends with its process."""
        self._saved = saved
        self._now = now
        self._events: list[OperatorsEvent] = []
        self._is_loaded = saved is None
        self._changed = asyncio.Event()

    def record(self, kind: Kind, subject: str, text: str, by: str) -> None:
        """Record an event of the current time."""
        self.add(event(kind, subject, text, by, self._now()))

    def add(self, event: OperatorsEvent) -> None:
        """Add an event; a failed login is joined with a recent one from the same address."""
        if event.kind == "failed login":
            event = self._joined(event)
        self._events.append(event)
        self._events = _bounded(self._events)
        self._changed.set()

    def latest(self) -> list[OperatorsEvent]:
        """Return the events, the newest first."""
        return self._events[::-1]

    async def run(self) -> None:
        """Take over a predecessor's events and save every change, until cancelled."""
        try:
            while self._saved is not None:
                await self._load()
                await self._save()
                await asyncio.sleep(SAVE_S)
                if self._is_loaded:
                    await self._changed.wait()
        finally:
            await self._end()

    async def _end(self) -> None:
        try:
            await within(self._load(), _STOP_S)
            await within(self._save(), _STOP_S)
        except asyncio.TimeoutError:
            logger.warning("the last events are not saved: their store does not answer")

    def _joined(self, event: OperatorsEvent) -> OperatorsEvent:
        for place, other in enumerate(self._events):
            is_same = (other.kind, other.subject, other.by) == (event.kind, event.subject, event.by)
            if is_same and event.at - other.at < _JOIN_S:
                del self._events[place]
                return replace(event, count=other.count + event.count)
        return event

    async def _load(self) -> None:
        if self._is_loaded or self._saved is None:
            return
        try:
            state = await self._saved.load()
        except BrokerError as error:
            logger.warning("the earlier events are not loaded yet: %s", error)
            return
        self._is_loaded = True
        if state is not None:
            self._events = _bounded([*state.events, *self._events])

    async def _save(self) -> None:
        """Save the events, if they have changed and include the predecessor's."""
        if self._saved is None or not self._is_loaded or not self._changed.is_set():
            return
        self._changed.clear()
        try:
            await self._saved.save(SavedEvents(tuple(self._events)))
        except (BrokerError, OSError) as error:
            self._changed.set()
            logger.warning("the events are not saved yet: %s", error)


def _bounded(events: list[OperatorsEvent]) -> list[OperatorsEvent]:
    """Return the events without the oldest beyond the limits."""
    failed = [entry for entry in events if entry.kind == "failed login"]
    dropped = (
        set(map(id, failed[:-MAX_FAILED_LOGINS])) if len(failed) > MAX_FAILED_LOGINS else set()
    )
    return [entry for entry in events if id(entry) not in dropped][-MAX_EVENTS:]
