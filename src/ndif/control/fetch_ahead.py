"""Downloads of booked models ahead of their bookings, so that a booking begins with the loading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from ndif.cluster.controller import Controller
from ndif.host.port import ActorError
from ndif.schedule.schedule import Window
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey
from ndif.stores.events import EventLog
from ndif.tasks import end

logger = logging.getLogger(__name__)

Fetch = Callable[[DeploymentConfig, str, str], Awaitable[None]]
"""Downloads a model for a generation to the node of this id; raises an `ActorError` if that fails."""

_RETRY_AFTER = timedelta(minutes=10)
"""Time until a failed download is retried."""

_Booking = tuple[ModelKey, datetime]


@dataclass(eq=False)
class FetchAhead:
    """Downloads booked models to the nodes where they would be placed now, in one task per booking.

    Only files are fetched; no memory is reserved before the booking begins. A download that is unfinished
    when the booking begins is cancelled, and the replica continues it.
    """

    controller: Controller
    fetch: Fetch
    ahead: timedelta
    """Time before the beginning of a booking at which the download of its model may start."""
    events: EventLog
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    _tasks: dict[_Booking, asyncio.Task[frozenset[str]]] = field(default_factory=dict, init=False)
    """The last download of each coming booking; returns the nodes that have the files, or no node."""
    _not_before: dict[_Booking, datetime] = field(default_factory=dict, init=False)

    def update(self, windows: Sequence[Window], generation: Callable[[Window], str]) -> None:
        """Start missing downloads for these windows; cancel downloads of begun or dropped bookings."""
        now = self.now()
        coming = {
            (window.config.key, window.start): window for window in windows if window.start > now
        }
        for booking in [key for key in self._tasks if key not in coming]:
            self._tasks.pop(booking).cancel()
            del self._not_before[booking]
        for booking, window in coming.items():
            last = self._tasks.get(booking)
            if last is None or (now >= self._not_before[booking] and self._needs_retry(last)):
                self._not_before[booking] = now + _RETRY_AFTER
                booked = {
                    other.config.key for other in windows if other.start <= window.start < other.end
                }
                fetching = self._fetch(window, generation(window), booked)
                self._tasks[booking] = asyncio.create_task(fetching, name="download ahead")

    def _needs_retry(self, last: asyncio.Task[frozenset[str]]) -> bool:
        """Return True if a download has failed, or a node with its files is gone."""
        if not last.done():
            return False
        return not last.result() or not last.result() <= self.controller.cluster.nodes.keys()

    async def stop(self) -> None:
        """Cancel the downloads."""
        await end(self._tasks.values())

    async def _fetch(
        self, window: Window, generation: str, booked: Collection[ModelKey]
    ) -> frozenset[str]:
        """Download; return the nodes with the files, or no node if any node of the booking lacks them."""
        name = window.config.repo_id
        try:
            nodes = await self._download(window.config, generation, booked)
        except ActorError as error:
            logger.warning("%s could not be downloaded ahead of its booking: %s", name, error)
            return frozenset()
        except Exception:
            logger.exception("%s could not be downloaded ahead of its booking", name)
            return frozenset()
        names = ", ".join(sorted(nodes.values()))
        text = f"Its files are on {names} for its booking at {window.start:%Y-%m-%d %H:%M %Z}."
        self.events.record("fetched", name, text, "calendar")
        return frozenset(nodes)

    async def _download(
        self, config: DeploymentConfig, generation: str, booked: Collection[ModelKey]
    ) -> dict[str, str]:
        """Download; return the nodes' names by id. Raise an `ActorError` if any replica lacks files."""
        places = await self.controller.preview(config, generation, booked)
        nodes = {node.id: node.name for node in places}
        # A cancellation cancels all downloads; the failure of one download does not end the rest.
        outcomes = await asyncio.gather(
            *(self.fetch(config, generation, node_id) for node_id in nodes), return_exceptions=True
        )
        problems = {
            node_id: outcome
            for node_id, outcome in zip(nodes, outcomes, strict=True)
            if outcome is not None
        }
        self.controller.note_files(config.key, nodes.keys() - problems.keys())
        if problems:
            raise next(iter(problems.values()))
        if len(places) < config.replicas:
            raise ActorError(f"now there is room for {len(places)} of {config.replicas} replicas")
        return nodes
