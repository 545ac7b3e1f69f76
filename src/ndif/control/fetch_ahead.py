"""Downloads of the calendar's models before their bookings begin, so that a booking begins with a load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
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
    _tasks: dict[_Booking, asyncio.Task[bool]] = field(default_factory=dict, init=False)
    """Of each coming booking the last download, which returns True once the files are there."""
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
            has_failed = last is not None and last.done() and not last.result()
            if last is None or (has_failed and now >= self._not_before[booking]):
                self._not_before[booking] = now + _AGAIN
                fetching = self._fetch(window, generation(window))
                self._tasks[booking] = asyncio.create_task(fetching, name="download ahead")

    async def stop(self) -> None:
        """End the downloads."""
        await end(self._tasks.values())

    async def _fetch(self, window: Window, generation: str) -> bool:
        config = window.config
        try:
            nodes = await self.controller.preview(config, generation)
            if not nodes:
                raise ActorError("no node has room for it now")  # noqa: TRY301
            await asyncio.gather(*(self.fetch(config, generation, node.id) for node in nodes))
        except ActorError as error:
            logger.warning("%s is not downloaded yet: %s", config.repo_id, error)
            return False
        except Exception:
            logger.exception("%s is not downloaded", config.repo_id)
            return False
        self.controller.note_files(config, generation, {node.id for node in nodes})
        names = ", ".join(sorted(node.name for node in nodes))
        text = f"Its files are on {names} for its booking at {window.start:%Y-%m-%d %H:%M %Z}."
        self.events.note("fetched", config.repo_id, text, "calendar")
        return True
