"""The jobs of one process, from claim to end: the part that the queue and a replica's process share.

`ndif.queue.lifecycle` adds the queue's part: clients that leave, replicas that are lost, and records.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ndif.host.job import RUNS, Component, Job, JobEvent
from ndif.host.port import EndedError, NotSharedError, ReplicaLostError, RequestRunner
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.port import Broker, BrokerError, BrokerUnavailableError, ClientLeftError
from ndif.stores.objects import ObjectStoreError
from ndif.stores.responder import Responder
from ndif.tasks import end
from ndif.telemetry.steps import recording

logger = logging.getLogger(__name__)

_REMEMBERED = 1000
"""Ends that a process remembers, because other participants may not know of them yet."""
_STOP_S = 5.0
_LOST = "The job ended, and its result was lost with its replica. Send it again."
_UNDELIVERED = "The job ended, and its result could not be delivered."
_DEFECT = "The server failed while it ran this job; its log says why."


class Reporter:
    """Reports the updates of a job in order, and drops an update that the job is already past."""

    __slots__ = ("_job", "_reports_dispatch", "_responder")

    def __init__(self, job: Job, responder: Responder, *, reports_dispatch: bool = True) -> None:
        """Report to the client of a job; `reports_dispatch`: False if the queue reports DISPATCHED."""
        self._job = job
        self._responder = responder
        self._reports_dispatch = reports_dispatch

    async def report(self, update: Response) -> bool:
        """Deliver an update; return False if a live client did not receive it."""
        job = self._job
        return await self._responder.respond(
            job.request, update, unless=lambda: not job.follow(update.status)
        )

    async def report_run(self, update: Response) -> bool:
        """Deliver an update from the job's replica; the run goes on while the broker is unavailable."""
        if update.status is Status.DISPATCHED and not self._reports_dispatch:
            return True
        try:
            return await self.report(update)
        except BrokerUnavailableError as error:
            if update.status is Status.STREAM:  # the client's part of the block waits for it
                raise BrokerError(str(error)) from error
            logger.warning("request %s: %s is not reported: %s", self._job.id, update.status, error)
            return True


@dataclass(eq=False)
class Lifecycle:
    """The jobs of a replica's process, and the base of the queue's `QueueLifecycle`.

    Delivers the updates of each job in order, and exactly one terminal response. Owns no claim: a job that
    does not end here returns to the queue. The callers decide which job runs next, and where.
    """

    broker: Broker
    responder: Responder
    by: ClassVar[Component] = Component.REPLICA
    """The component that this process acts as."""
    _jobs: dict[str, Job] = field(default_factory=dict, init=False)
    _ended: dict[str, Response] = field(default_factory=dict, init=False)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set, init=False)

    @property
    def remembered(self) -> list[str]:
        """Ids of the jobs that ended most recently."""
        return [*self._ended]

    def end_of(self, job_id: str) -> Response | None:
        """Return the end of a job without its result; None if it is not known to have ended here."""
        return self._ended.get(job_id)

    # The five verbs

    def claim(self, request: Request) -> Job | None:
        """Hold a request as a `Job`; return None if it is held or has ended here already.

        A broker whose connection was lost may hand out the same request twice.
        """
        if request.id in self._jobs or request.id in self._ended:
            return None
        job = self._jobs[request.id] = Job(request, self.by)
        job.move(JobEvent.CLAIM)
        return job

    async def dispatch(self, job: Job, runner: RequestRunner, replica_id: str = "") -> Response:
        """Run a job on a replica and return its terminal response, which `complete` takes.

        `replica_id` names the replica in the log. Raise the errors of `RequestRunner.run` if the request
        did not run to its end: the caller then calls `release` after an `EndedError`, else `give_back`.
        """
        job.steps.replica = replica_id
        job.move(JobEvent.DISPATCH)
        job.dispatched, job.running = time.time(), None
        job.runner = runner
        reporter = Reporter(job, self.responder, reports_dispatch=self.by is Component.QUEUE)
        try:
            if job.cancelled is not None:
                return Response(job.id, Status.ERROR, job.cancelled)
            with recording(job.steps):
                return await runner.run(job.request, reporter.report_run)
        except (
            BrokerUnavailableError,
            ClientLeftError,
            EndedError,
            NotSharedError,
            ReplicaLostError,
        ):
            raise
        except (BrokerError, ObjectStoreError) as error:
            logger.error("request %s: %s", job.id, error)  # noqa: TRY400 - a sentence
            return Response(job.id, Status.ERROR, f"The job could not be run: {error}.")
        except Exception:
            # A defect of the server costs one request, not the queue.
            logger.exception("request %s failed in its replica", job.id)
            return Response(job.id, Status.ERROR, _DEFECT)
        finally:
            job.runner = None

    async def give_back(self, job: Job, error: Exception | None = None) -> bool:
        """Take back a job that did not run to its end; return True if it must wait here again."""
        if not job.over.is_set() and job.is_held:
            self._forget(job)
        return False

    async def complete(self, job: Job, response: Response) -> Response:
        """Deliver a job's terminal response; a second one is ignored.

        Return the end without its result; its `delivered` is True if the client can see the end.
        """
        if not job.finish(response):
            return self._ended.get(job.id, response)
        is_silent = response.meta is None and response.status is Status.ERROR
        if is_silent and job.running is not None:
            # The runner was ended, and did not report how long the block had run.
            ran_s = round(max(0.0, job.since - job.running), 6)
            job.end = response = replace(response, meta={"peak_memory": 0, "execution_time": ran_s})
        if self.by is Component.REPLICA:
            # The leader may learn of the end from the message to the client, which thus carries the steps.
            response = replace(response, steps=job.steps.all)
        return await self._end(job, response)

    async def fail(self, job: Job, reason: str) -> None:
        """End a job as an ERROR, even if the caller is cancelled meanwhile."""
        ran_s = job.ran_s() if job.state in RUNS else 0.0
        response = Response(job.id, Status.ERROR, reason)
        if job.finish(response):
            job.unanswered_s += ran_s
            await asyncio.shield(self._spawn(self._end(job, response), f"end of {job.id}"))

    async def release(self, request: Request) -> None:
        """Drop a job whose terminal response was already delivered, and ensure that a poll finds one."""
        if (job := self._jobs.get(request.id)) is not None:
            job.move(JobEvent.RELEASE)
            self._forget(job)
            self._note_end(job, self._ended.get(request.id))
        if request.subscription_id is not None:
            return
        response = self._ended.get(request.id) or Response(request.id, Status.ERROR, _LOST)
        try:
            await self.responder.ensure_end(request, response)
        except Exception:
            logger.exception("request %s: its end could not be delivered", request.id)

    # Cancellation, absence and stopping

    def cancel(self, job_id: str, reason: str) -> bool:
        """End a job as an ERROR with `reason`; return False if it is not held.

        A waiting job ends when it would be sent to a replica, unless the caller ends it before.
        """
        job = self._jobs.get(job_id)
        if job is None or not job.is_held:
            return False
        job.cancelled = reason
        if job.runner is not None:
            job.runner.cancel(reason)
        return True

    async def disconnected(self, requests: Iterable[Request]) -> set[str]:
        """Return the ids of the requests whose live client is disconnected."""
        live = {request.id: request.subscription_id for request in requests}
        disconnected = await self.broker.disconnected(
            {subscription_id for subscription_id in live.values() if subscription_id is not None}
        )
        return {
            request_id
            for request_id, subscription_id in live.items()
            if subscription_id in disconnected
        }

    async def stop(self) -> None:
        """Wait a few seconds for responses that are being delivered, then cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        await end(list(self._tasks))

    # The end of a job

    async def _end(self, job: Job, response: Response) -> Response:
        try:
            await self._deliver(job.request, response)
        except Exception as error:
            return await self._end_undelivered(job, response, error)
        return self._end_delivered(job, response)

    def _end_delivered(self, job: Job, response: Response) -> Response:
        if not response.delivered:
            job.steps.add("deliver", job.since)
        return self._remember(job, replace(response, delivered=True))

    async def _end_undelivered(self, job: Job, response: Response, error: Exception) -> Response:
        """Return the end of a job whose terminal response could not be delivered."""
        if not isinstance(error, ObjectStoreError):
            logger.error("request %s: its end could not be delivered", job.id, exc_info=error)
        return self._remember(job, Response(job.id, Status.ERROR, _UNDELIVERED))

    async def _deliver(self, request: Request, response: Response) -> None:
        if request.subscription_id is not None:
            if not response.delivered:
                await self.responder.respond(request, response)
        elif response.delivered:
            # The replica that delivered the response may be lost before it releases the request.
            await self.broker.release(request)
        elif request.refusal:
            # The request is not signed and may have the id of another job, whose end must stay.
            await self.responder.ensure_end(request, response)
            await self.broker.release(request)
        elif await self._is_complete(request):
            # Two leaders sent it to two replicas: the first end holds.
            await self.responder.ensure_end(request, response)
        else:
            await self.responder.respond(request, response)

    async def _is_complete(self, request: Request) -> bool:
        try:
            return await self.broker.is_complete(request)
        except BrokerError as error:
            logger.warning("request %s: %s", request.id, error)
            return False

    def _remember(self, job: Job, response: Response) -> Response:
        """Remember the end of a job, without a live result, which no client fetches again."""
        self._forget(job)
        self._note_end(job, response)
        if job.is_live:
            response = replace(response, data=None)
        self._ended[job.id] = response
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return response

    def _note_end(self, job: Job, response: Response | None) -> None:
        """Record the end of a job; a subclass that keeps records overrides this method."""

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.id, None)
        job.over.set()

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
