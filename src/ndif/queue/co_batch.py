"""Requests of one model that share a forward pass on one replica.

Only trusted requests do, which run in one process anyway. A pass is an attempt: the replica answers those
whose values it does not change, and the others run alone, one after the other, as if nothing had been.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from ndif.host.execution import announce
from ndif.host.port import ModelActor, ReplicaLostError, Respond
from ndif.schema.payload import PayloadFile
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.tasks import end
from ndif.telemetry import metrics
from ndif.telemetry.steps import current

logger = logging.getLogger(__name__)

_HEARD_S = 1.0
"""Seconds in which a client hears that its job was sent, or the pass begins without that job."""
_GRACE_S = 5.0
"""Seconds that a pass may go on for the others once a request of it was cancelled, which may hold it up."""


def may_share(first: Request, other: Request) -> bool:
    """Return True if two requests of a model may share a forward pass, should their blocks allow it."""
    return (
        all(
            each.trusted and "peft" not in each.env and not isinstance(each.payload, PayloadFile)
            for each in (first, other)
        )
        and first.env == other.env
    )


class CoBatch:
    """The requests of one attempt, each of which has a `Seat` for its actor.

    The pass begins once every request has arrived at its seat or left: its client may be gone, or it may
    have been cancelled.
    """

    def __init__(self, actor: ModelActor, requests: Sequence[Request]) -> None:
        self.actor = actor
        self.alone = asyncio.Lock()
        """Held by the request that runs alone."""
        self._coming = {request.id for request in requests}
        self._seated: list[Request] = []
        self._complete = asyncio.Event()
        self.running = asyncio.create_task(self._run(), name="forward pass of several")
        """The pass; its result are the responses by request."""

    def seat(self) -> Seat:
        """Return the place of one request."""
        return Seat(self)

    def arrive(self, request: Request) -> None:
        """Let a request take part."""
        self._seated.append(request)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """Wait for a request no more."""
        self._coming.discard(request.id)
        if not self._coming:
            self._complete.set()

    def give_up(self) -> None:
        """End the pass, if there still is one; its requests run alone."""
        if not self.running.done():
            self.actor.cancel("a request that shared its forward pass was cancelled")

    async def _run(self) -> dict[str, Response]:
        await self._complete.wait()
        requests = list(self._seated)
        if len(requests) < 2:
            return {}
        try:
            found = await self.actor.run_together(requests)
        except ReplicaLostError:
            raise
        except Exception:  # a defect of ours costs the time of the attempt
            logger.exception("%d requests could not run together", len(requests))
            return {}
        return {
            request.id: response
            for request, response in zip(requests, found, strict=True)
            if response is not None
        }


class Seat:
    """One request's `RequestRunner`: the forward pass with others, else the actor."""

    def __init__(self, batch: CoBatch) -> None:
        self._batch = batch
        self._cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_alone = False

    def cancel(self, reason: str) -> None:
        """See `RequestRunner.cancel`. The pass goes on for the others, unless it takes long."""
        if self._is_alone:
            self._batch.actor.cancel(reason)
        elif not self._cancelled.done():
            self._cancelled.set_result(reason)
            asyncio.get_running_loop().call_later(_GRACE_S, self._batch.give_up)

    async def run(self, request: Request, respond: Respond) -> Response:
        """See `RequestRunner.run`."""

        async def respond_after(response: Response) -> bool:
            return response.status is Status.DISPATCHED or await respond(response)

        if await self._is_soon(announce(request, respond), request):
            self._batch.arrive(request)
        if await self._unless_cancelled(self._batch.running):
            found = self._batch.running.result().get(request.id)
            if found is not None:
                metrics.SHARED.labels(metrics.model_label(request.model.label)).inc()
                return _with_steps_noted(found)
            turn = asyncio.create_task(self._batch.alone.acquire())
            try:
                if await self._unless_cancelled(turn):
                    self._is_alone = True
                    return await self._batch.actor.run(request, respond_after)
            finally:
                await end([turn])
                if not turn.cancelled():
                    self._batch.alone.release()
        return Response(request.id, Status.ERROR, self._cancelled.result())

    async def _is_soon(self, announcing: Coroutine[Any, Any, None], request: Request) -> bool:
        """Tell a client that its job was sent; return False if the pass does not wait for that."""
        task = asyncio.create_task(announcing, name="announcement")
        try:
            await asyncio.wait([task], timeout=_HEARD_S)
            if is_soon := task.done():
                task.result()
            else:
                self._batch.leave(request)
                await task
        finally:
            await end([task])
        return is_soon

    async def _unless_cancelled(self, coming: asyncio.Task[Any]) -> bool:
        """Wait for something; return False if the request is cancelled first."""
        await asyncio.wait({coming, self._cancelled}, return_when=asyncio.FIRST_COMPLETED)
        return not self._cancelled.done()


def _with_steps_noted(response: Response) -> Response:
    """Record the steps of a response as those of the request that is served here."""
    if (steps := current()) is not None:
        for each in response.steps:
            steps.note(each)
    return replace(response, steps=())
