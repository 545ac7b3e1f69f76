"""The updates of one job, on their way to its client."""

from __future__ import annotations

import logging

from ndif.host.job import Job
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.port import BrokerAwayError, BrokerError
from ndif.stores.responder import Responder

logger = logging.getLogger(__name__)


class Reporter:
    """Reports what happens to a job: each update in its turn, and none that the job is past by then."""

    __slots__ = ("_job", "_responder", "_tells_dispatch")

    def __init__(self, job: Job, responder: Responder, *, tells_dispatch: bool = True) -> None:
        """Report to the client of a job; `tells_dispatch`: False where the queue tells DISPATCHED."""
        self._job = job
        self._responder = responder
        self._tells_dispatch = tells_dispatch

    async def report(self, update: Response) -> bool:
        """Deliver an update; return False if a live client was not there to receive it."""
        job = self._job
        return await self._responder.respond(
            job.request, update, unless=lambda: not job.follow(update.status)
        )

    async def report_run(self, update: Response) -> bool:
        """Deliver an update of the replica that runs the job, which goes on while the broker is away."""
        if update.status is Status.DISPATCHED and not self._tells_dispatch:
            return True
        try:
            return await self.report(update)
        except BrokerAwayError as error:
            if update.status is Status.STREAM:  # its client's part of the block waits for that
                raise BrokerError(str(error)) from error
            logger.warning("request %s: %s is not told: %s", self._job.id, update.status, error)
            return True
