"""The jobs that the queue has claimed, including departures of clients and losses of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from ndif.host.job import CLIENT_LEFT, RUNS, WAITING, Component, Job, JobEvent, describe
from ndif.host.lifecycle import Lifecycle, Reporter
from ndif.host.port import (
    NotSharedError,
    ReplicaEvictedError,
    ReplicaLostError,
    RequestRunner,
)
from ndif.schema.job_record import JobRecord
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.port import BrokerError, BrokerUnavailableError
from ndif.stores.objects import ObjectStoreError
from ndif.tasks import end, within
from ndif.telemetry import metrics
from ndif.telemetry.steps import fields_of

logger = logging.getLogger(__name__)
_log = logging.getLogger("ndif.requests")
"""One line for each request, when it has ended."""

_CHECKS, _CHECK_S = 10, 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass(eq=False)
class QueueLifecycle(Lifecycle):
    """The jobs of the process that claims requests from the broker: the embedded server, or the leader.

    Owns the claims: a claimed request ends here, or the next leader claims it.
    """

    by: ClassVar[Component] = Component.QUEUE
    max_attempts: int = 1
    """Most runs of a job whose replicas fail."""
    on_absence: Callable[[Job], None] = lambda _: None
    """Receives a waiting job whose live client has disconnected."""
    on_end: Callable[[JobRecord], None] = lambda _: None
    """Receives the record of each job that has ended."""

    @property
    def held(self) -> list[Request]:
        """Requests that have not ended."""
        return [job.request for job in self._jobs.values()]

    def unfinished(self) -> Iterator[Job]:
        """Yield each job that has not ended."""
        yield from [job for job in self._jobs.values() if job.is_held]

    def job(self, job_id: str) -> Job | None:
        """Return a job that is held; None for any other."""
        return self._jobs.get(job_id)

    def holds(self, job_id: str) -> bool:
        """Return True if a job is held, or ended not long ago."""
        return job_id in self._jobs or job_id in self._ended

    def exhausted(self, job: Job) -> str | None:
        """Return the reason why a job that was just claimed does not run again; None if it may."""
        if job.losses < self.max_attempts:
            return None
        return (
            f"The server ended {_times(job.losses)} while it ran this job. "
            "It may need more memory than the server has."
        )

    def claim(self, request: Request) -> Job | None:
        """See `Lifecycle.claim`. A job whose live client leaves while it waits goes to `on_absence`."""
        job = super().claim(request)
        if job is not None:
            self._watch(job)
        return job

    async def dispatch(self, job: Job, runner: RequestRunner, replica_id: str = "") -> Response:
        """See `Lifecycle.dispatch`. The broker notes the attempt, in case this process is killed."""
        self.broker.note_attempts(job.request, job.losses + 1)
        return await super().dispatch(job, runner, replica_id)

    async def give_back(self, job: Job, error: Exception | None = None) -> bool:
        """Take a job back from a replica, or from the queue if its client is disconnected.

        If the client is disconnected, the job waits some seconds for the client, since a gateway that lost
        its connection soon restores it. While the broker is unavailable, the job waits for the broker.
        Return True if the job must wait in the queue again.
        """
        if job.over.is_set() or not job.is_held:
            return False
        if isinstance(error, ReplicaLostError) and not isinstance(error, ReplicaEvictedError):
            job.unanswered_s += job.ran_s()
        job.move(JobEvent.GIVE_BACK)
        if isinstance(error, NotSharedError):
            reason = job.cancelled
        elif isinstance(error, BrokerUnavailableError | ReplicaLostError):
            if await self._is_complete_at_last(job):  # the replica was lost after the end
                await self.release(job.request)
                return False
            reason = job.cancelled
            if reason is None and isinstance(error, ReplicaLostError):
                reason = self._reason_after_loss(job, error)
        else:
            reason = await self._reason_after_absence(job)
        if reason is None:
            self.broker.note_attempts(job.request, job.losses)
            self._watch(job)
            if not isinstance(error, NotSharedError):  # such a job runs again at once
                await self._report_return(job, error)
            if job.cancelled is None:
                return True
            reason = job.cancelled  # cancelled while a slow store was updated
        await self.fail(job, reason)
        return False

    async def report(self, job: Job, update: Response) -> bool:
        return await Reporter(job, self.responder).report(update)

    async def ensure_cancelled(self, job_id: str, within_s: float) -> bool:
        """Return once a cancelled job has ended; end it without its replica if that takes too long.

        Return False if it ended by itself before it could be cancelled.
        """
        if (job := self._jobs.get(job_id)) is None:
            return False
        with contextlib.suppress(asyncio.TimeoutError):
            await within(job.over.wait(), within_s)
        if not job.over.is_set() and job.cancelled is not None:
            logger.warning(
                "request %s: its replica does not answer; the request ends without it", job_id
            )
            await self.fail(job, job.cancelled)
        return job.end is not None and job.end.description == job.cancelled

    async def until_over(self, requests: Iterable[Request]) -> None:
        """Return once none of these requests is held."""
        jobs = [self._jobs[request.id] for request in requests if request.id in self._jobs]
        await asyncio.gather(*(job.over.wait() for job in jobs))

    async def stop(self) -> None:
        """See `Lifecycle.stop`. A run that ends with this process does not count as an attempt."""
        for job in self._jobs.values():
            if job.state in RUNS:
                self.broker.note_attempts(job.request, job.losses)
        await super().stop()
        await end([job.watching for job in self._jobs.values() if job.watching is not None])

    # Clients that leave, and replicas that are lost

    def _watch(self, job: Job) -> None:
        """Watch over the live client of a job: without the client, the job only delays others."""
        subscription_id = job.request.subscription_id
        if subscription_id is not None and (job.watching is None or job.watching.done()):
            job.watching = asyncio.create_task(self._await_absence(job, subscription_id))

    async def _await_absence(self, job: Job, subscription_id: str) -> None:
        await self.broker.until_disconnected(subscription_id)
        if job.runner is not None:
            job.runner.cancel(CLIENT_LEFT)
        elif job.state in WAITING:
            self.on_absence(job)

    async def _reason_after_absence(self, job: Job) -> str | None:
        """Return the reason to end a job whose client is disconnected; None if it is back in time."""
        for _ in range(_CHECKS):
            if not await self.disconnected([job.request]):
                return job.cancelled
            await asyncio.sleep(_CHECK_S)
        logger.info("request %s: its client left", job.id)
        return job.cancelled or CLIENT_LEFT

    async def _report_return(self, job: Job, error: Exception | None) -> None:
        """Report to a client that polls that its job waits again; its stored update is no longer true."""
        if job.is_live:
            return
        text = f"Your job waits again: {error}." if error else "Your job waits again."
        try:
            await self.report(job, Response(job.id, Status.QUEUED, text))
        except Exception:
            logger.exception(
                "the client of request %s could not be notified that it waits again", job.id
            )

    async def _is_complete_at_last(self, job: Job) -> bool:
        """Wait until the broker answers; return True if a job has its terminal response.

        No job can run without a broker anyway. A cancelled job does not wait.
        """
        while job.cancelled is None:
            try:
                return await self.broker.is_complete(job.request)
            except BrokerError as error:
                logger.warning("request %s waits: %s", job.id, error)
            await asyncio.sleep(_CHECK_S)
        return False

    def _reason_after_loss(self, job: Job, error: ReplicaLostError) -> str | None:
        """Return the reason why a job does not run again after its replica was lost; None if it does."""
        if isinstance(error, ReplicaEvictedError):
            logger.info("request %s: %s; it waits for another replica", job.id, error)
            return None
        job.losses += 1
        if job.losses < self.max_attempts:
            logger.warning("request %s: %s; it is tried again", job.id, error)
            return None
        return (
            f"The model's process was lost {_times(job.losses)} while it ran this job ({error}). "
            "It may need more memory than the server has."
        )

    # The end of a job

    async def _end_undelivered(self, job: Job, response: Response, error: Exception) -> Response:
        """See `Lifecycle._end_undelivered`. While the object store is unavailable, delivery is retried."""
        if isinstance(error, ObjectStoreError):
            logger.warning("request %s: its end is not stored yet: %s", job.id, error)
            self._spawn(self._deliver_later(job, response), f"late end of {job.id}")
            return response
        await self.broker.release(job.request)
        return await super()._end_undelivered(job, response, error)

    async def _deliver_later(self, job: Job, response: Response) -> None:
        """Deliver an end, however long the store is unavailable: otherwise a poll would never find one."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            try:
                await self._deliver(job.request, response)
            except ObjectStoreError as error:
                logger.warning("request %s: %s", job.id, error)
            except Exception as error:
                await self._end_undelivered(job, response, error)
                return
            else:
                self._end_delivered(job, response)
                return

    def _note_end(self, job: Job, response: Response | None) -> None:
        """Log and record a job that has ended, also one that ended in a replica's process."""
        record = job.record(response)
        peak_memory, limit = (0, "") if response is None else (response.peak_memory, response.limit)
        metrics.job_ended(record, peak_memory, limit)
        fields = {**fields_of(job.request), "status": record.status}
        _log.info("%s", describe(record), extra=fields)
        if not job.request.refusal:  # a refused request is not signed, so its user is unknown
            self.on_end(record)

    def _forget(self, job: Job) -> None:
        super()._forget(job)
        if job.watching is not None:
            job.watching.cancel()
            # A cancelled task keeps its frames, and these would keep the end of the request in memory.
            job.watching = None


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
