"""Updates to the clients whose requests wait in one queue."""

from __future__ import annotations

import asyncio
import logging

from ndif.host.request_lifecycle import RequestLifecycle
from ndif.queue.fair_queue import Entry, FairQueue
from ndif.queue.replicas import Replicas
from ndif.queue.run_times import RunTimes, describe_wait
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status

logger = logging.getLogger(__name__)


class PositionUpdates:
    """Tell waiting clients their position, and how long they are likely to wait.

    Reads the queue, its replicas and its run times, and reports through the `RequestLifecycle`, which
    drops an update for a request that no longer waits.
    """

    def __init__(
        self,
        queue: FairQueue[Request],
        replicas: Replicas,
        run_times: RunTimes,
        lifecycle: RequestLifecycle,
    ) -> None:
        self._queue = queue
        self._replicas = replicas
        self._run_times = run_times
        self._lifecycle = lifecycle

    async def repeat(self, interval_s: float) -> None:
        """Tell every waiting client its position, again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            work_ahead_s = 0.0
            for entry, position in self._queue.positions() if self._queue else ():
                await self.send_position(entry, position, work_ahead_s)
                work_ahead_s += self._run_times.expected(entry)

    async def send_position(
        self, entry: Entry[Request], position: int, work_ahead_s: float | None = None
    ) -> None:
        """Tell one client its position, and the estimated start where run times are known."""
        text = (
            f"Your job is number {position + len(self._replicas.runs)} in the queue for "
            f"{entry.item.model.repo_id}."
        )
        wait_s = self.wait_s(position, work_ahead_s)
        if wait_s is not None:
            text += f" Estimated start: in {describe_wait(wait_s)}."
        await self._send(entry, Status.QUEUED, text)

    async def send_all(self, status: Status, text: str) -> None:
        """Tell all waiting clients the same."""
        for entry in list(self._queue):
            await self._send(entry, status, text)

    def wait_s(self, position: int, work_ahead_s: float | None = None) -> float | None:
        """Estimate the seconds until the request at `position` starts; None without run-time history."""
        running = [run.since for run in self._replicas.runs]
        now = asyncio.get_running_loop().time()
        wait = self._run_times.wait(position, self._replicas.serving, running, now, work_ahead_s)
        return None if wait is None else wait.seconds

    async def _send(self, entry: Entry[Request], status: Status, text: str) -> None:
        try:
            await self._lifecycle.report(entry.item, Response(entry.id, status, text))
        except Exception:
            # The request waits all the same, and a later update tells its client.
            logger.exception("request %s: its position could not be delivered", entry.id)
