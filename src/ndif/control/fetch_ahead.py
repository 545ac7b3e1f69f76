"""Downloads of the calendar's models before their bookings begin, so that a booking begins with a load."""

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
"""Downloads a model for a generation to the node of this id; raises an `ActorError`."""

_AGAIN = timedelta(minutes=10)
"""Time until a download that failed is tried again."""

_Booking = tuple[ModelKey, datetime]


@dataclass(eq=False)
class FetchAhead:
    """Downloads what is booked to the nodes where it would go now, each model in a task of its own.

    Files alone are fetched: memory stays with the models that have it until the booking begins. A download
    that has not ended by then is left to the replica, which goes on with it.
    """

    controller: Controller
    fetch: Fetch
    ahead: timedelta
    """Time before a booking in which its model is downloaded."""
    events: EventLog
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    _tasks: dict[_Booking, asyncio.Task[frozenset[str]]] = field(default_factory=dict, init=False)
    """Of each coming booking the last download, which returns the nodes that have all that it needs."""
    _not_before: dict[_Booking, datetime] = field(default_factory=dict, init=False)

    def look(self, windows: Sequence[Window], generation: Callable[[Window], str]) -> None:
        """Start the downloads of these windows that have not begun, and whose files are not there."""
        now = self.now()
        coming = {(each.config.key, each.start): each for each in windows if each.start > now}
        for booking in [each for each in self._tasks if each not in coming]:
            self._tasks.pop(booking).cancel()
            del self._not_before[booking]
        for booking, window in coming.items():
            last = self._tasks.get(booking)
            if last is None or (now >= self._not_before[booking] and self._is_void(last)):
                self._not_before[booking] = now + _AGAIN
                booked = {
                    each.config.key for each in windows if each.start <= window.start < each.end
                }
                fetching = self._fetch(window, generation(window), booked)
                self._tasks[booking] = asyncio.create_task(fetching, name="download ahead")

    def _is_void(self, last: asyncio.Task[frozenset[str]]) -> bool:
        """Return True if a download has failed, or the node that it went to is gone."""
        if not last.done():
            return False
        return not last.result() or not last.result() <= self.controller.cluster.nodes.keys()

    async def stop(self) -> None:
        """End the downloads."""
        await end(self._tasks.values())

    async def _fetch(
        self, window: Window, generation: str, booked: Collection[ModelKey]
    ) -> frozenset[str]:
        """Return the nodes that have the files now; none if replicas of the booking lack them."""
        name = window.config.repo_id
        try:
            nodes = await self._download(window.config, generation, booked)
        except ActorError as error:
            logger.warning("%s is not downloaded yet: %s", name, error)
            return frozenset()
        except Exception:
            logger.exception("%s is not downloaded", name)
            return frozenset()
        on = ", ".join(sorted(nodes.values()))
        text = f"Its files are on {on} for its booking at {window.start:%Y-%m-%d %H:%M %Z}."
        self.events.note("fetched", name, text, "calendar")
        return frozenset(nodes)

    async def _download(
        self, config: DeploymentConfig, generation: str, booked: Collection[ModelKey]
    ) -> dict[str, str]:
        """Return the names, by id, of the nodes that have the files, or raise the first error."""
        places = await self.controller.preview(config, generation, booked)
        nodes = {node.id: node.name for node in places}
        # An end from outside reaches all of them, and the failure of one no other.
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
