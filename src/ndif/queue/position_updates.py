"""Updates: what those who wait in a line are told, when they come and at regular times."""

from __future__ import annotations

import asyncio
import logging

from ndif.queue.estimates import RunTimes, describe_wait
from ndif.queue.line import Entry, Line
from ndif.queue.replicas import Replicas
from ndif.queue.responder import Responder
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status

logger = logging.getLogger(__name__)


class Updates:
    """Tells everybody of one line where they stand; nobody who waits no longer."""

    def __init__(
        self,
        line: Line[Request],
        replicas: Replicas,
        run_times: RunTimes,
        responder: Responder,
    ) -> None:
        self._line = line
        self._replicas = replicas
        self._run_times = run_times
        self._responder = responder

    async def repeat(self, interval_s: float) -> None:
        """Tell everybody their position, again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            work_ahead_s = 0.0
            for entry, position in self._line.positions() if self._line else ():
                await self.position(entry, position, work_ahead_s)
                work_ahead_s += self._run_times.expected(entry)

    async def position(
        self, entry: Entry[Request], position: int, work_ahead_s: float | None = None
    ) -> None:
        """Tell one of them their position, and how long they wait, where something is known of it."""
        text = (
            f"Your job is number {position + len(self._replicas.runs)} in the line for "
            f"{entry.what.model.repo_id}."
        )
        wait_s = self.wait_s(position, work_ahead_s)
        if wait_s is not None:
            text += f" By what jobs took lately it starts in {describe_wait(wait_s)}."
        await self._tell(entry, Status.QUEUED, text)

    async def everybody(self, status: Status, text: str) -> None:
        """Tell all of them the same."""
        for entry in list(self._line):
            await self._tell(entry, status, text)

    def wait_s(self, position: int, work_ahead_s: float | None = None) -> float | None:
        """Seconds until whoever is at that place starts; None while nothing is known of it."""
        running = [run.since for run in self._replicas.runs]
        now = asyncio.get_running_loop().time()
        wait = self._run_times.wait(position, self._replicas.serving, running, now, work_ahead_s)
        return None if wait is None else wait.seconds

    async def _tell(self, entry: Entry[Request], status: Status, text: str) -> None:
        try:
            await self._responder.respond(
                entry.what,
                Response(entry.id, status, text),
                unless=lambda: entry.id not in self._line,
            )
        except Exception:
            # They wait all the same, and hear of what comes next.
            logger.exception("request %s could not be told where it is", entry.id)
