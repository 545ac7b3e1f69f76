"""Requests of one model that share a forward pass on one replica.

Only trusted requests share one, since they run in one process anyway. A pass is an attempt: the replica
answers the requests whose values the pass does not change; the others return to the head of the queue and
run alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from ndif.host.execution import announce
from ndif.host.job import Job
from ndif.host.port import (
    NotSharedError,
    ReplicaLostError,
    RequestRunner,
    Respond,
    SharedPasses,
)
from ndif.queue.fair_queue import FairQueue
from ndif.schema.payload import PayloadFile
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.tasks import end
from ndif.telemetry import metrics
from ndif.telemetry.steps import current

logger = logging.getLogger(__name__)


Serve = Callable[[Job, RequestRunner, int], Coroutine[Any, Any, None]]
"""Runs a job on a replica, or on a seat in a pass; the integer is the number of jobs sharing the time."""


def take(queue: FairQueue[Job], most: int) -> list[Job]:
    """Take the next job, and the jobs after it that may share its forward pass."""
    first = queue.take() if queue else None
    if first is None:
        return []
    taken = [first]
    while len(taken) < most and (job := next(queue.order(), None)) is not None:
        if first.exclusive or job.exclusive or not may_share(first.request, job.request):
            break
        queue.take()
        taken.append(job)
    return taken


async def run(passes: SharedPasses, jobs: Sequence[Job], serve: Serve) -> None:
    """Serve several jobs in one forward pass of a replica, where they can share it."""
    shared = _Pass(passes, [job.request for job in jobs])
    serving = [
        asyncio.create_task(serve(job, _Seat(shared), len(jobs)), name=f"request {job.id}")
        for job in jobs
    ]
    try:
        await asyncio.wait([*serving, shared.running])
    finally:
        await end([*serving, shared.running])
    for task in serving:
        task.result()


def may_share(first: Request, other: Request) -> bool:
    """Return True if two requests of a model may share a forward pass, should their blocks allow it."""
    return (
        all(
            request.trusted
            and not request.names_adapter
            and not isinstance(request.payload, PayloadFile)
            for request in (first, other)
        )
        and first.env == other.env
    )


class _Pass:
    """One forward pass of several requests, which begins at once."""

    def __init__(self, passes: SharedPasses, requests: Sequence[Request]) -> None:
        self._passes = passes
        self._requests = requests
        self.running = asyncio.create_task(self._run(), name="forward pass of several")
        """Task of the pass; its result is the responses by request id."""

    async def _run(self) -> dict[str, Response]:
        responses: Sequence[Response | None] = ()
        try:
            responses = await self._passes.run(self._requests)
        except ReplicaLostError as error:
            # Running each request alone shows which of them is to blame.
            logger.warning("%d requests run alone: %s", len(self._requests), error)
        except Exception:  # a defect of the server costs the time of the attempt
            logger.exception("%d requests could not run together", len(self._requests))
        answered = zip(self._requests, responses, strict=False)
        return {request.id: response for request, response in answered if response is not None}


class _Seat:
    """The `RequestRunner` of one request of a pass."""

    def __init__(self, shared: _Pass) -> None:
        self._shared = shared
        self._cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def cancel(self, reason: str) -> None:
        """See `RequestRunner.cancel`. The pass goes on for the others."""
        if not self._cancelled.done():
            self._cancelled.set_result(reason)

    async def run(self, request: Request, respond: Respond) -> Response:
        """See `RequestRunner.run`. Raise a `NotSharedError` if the pass does not answer the request."""
        await announce(request, respond)
        running = self._shared.running
        futures: set[asyncio.Future[Any]] = {running, self._cancelled}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if self._cancelled.done():
            return Response(request.id, Status.ERROR, self._cancelled.result())
        response = running.result().get(request.id)
        if response is None:
            raise NotSharedError
        metrics.SHARED.labels(metrics.model_label(request.model.label)).inc()
        if (steps := current()) is not None:
            for step in response.steps:
                steps.record(step)
        return replace(response, steps=())
