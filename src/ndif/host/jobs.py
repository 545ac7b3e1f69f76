"""The jobs of one replica: each runs once, one at a time, and its client is told its end from here.

Whichever process leads asks for a job, by a call or over the replica's job channel, and may ask twice. No
update and no result passes through the leader: the answer is a few words that may be lost without harm.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from ndif.host.port import EndedError, ModelActor, ReplicaEvictedError, ReplicaLostError
from ndif.host.request_lifecycle import Party, RequestLifecycle
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker.port import Broker, ClientLeftError
from ndif.stores.responder import Responder

logger = logging.getLogger(__name__)

Answer = dict[str, Any]

_EARLY = 1000
"""Cancelled jobs that a replica remembers before they come."""
_LOOK_S = 1.0
_DESCRIPTION = 200
"""Characters of a response's description that an answer has."""


class JobSource(Protocol):
    """The replica's end of its job channel."""

    async def next(self) -> Request:
        """Return the next job."""
        ...

    async def give_back(self, request: Request) -> None:
        """Tell the leader that a job of this channel has not ended here."""
        ...


@dataclass(frozen=True, slots=True)
class NodeServices:
    """The actor, stores and job channel of a replica on its node."""

    actor: ModelActor
    """Not started."""
    broker: Broker
    responder: Responder
    channel: JobSource


class Jobs:
    """The jobs that one replica was sent.

    Runs them in turn on the replica's `ModelActor`, leaves their states and ends to a
    `RequestLifecycle`, and answers the leader. Which job comes next is the leader's choice.
    """

    def __init__(self, services: NodeServices) -> None:
        self._actor = services.actor
        self._channel = services.channel
        self._lifecycle = RequestLifecycle(services.broker, services.responder, Party.REPLICA)
        self._turn = asyncio.Lock()
        self._current: Request | None = None
        self._runs: dict[str, asyncio.Task[Answer]] = {}
        self._cancelled_early: dict[str, str] = {}

    @property
    def known(self) -> list[str]:
        """Ids of the jobs that run, wait, or ended not long ago."""
        return [*self._runs, *self._lifecycle.remembered]

    async def run(self, request: Request) -> Answer:
        """Run a job to its end and return that end, or `lost` or `evicted` with the reason.

        A job that runs already, or has ended, does not run again. A job that comes meanwhile waits.
        """
        if (end := self._lifecycle.end_of(request.id)) is not None:
            await self._lifecycle.release(request)
            return _answer(end)
        if request.id not in self._runs:
            self._runs[request.id] = asyncio.create_task(self._run(request), name=request.id)
        return await asyncio.shield(self._runs[request.id])

    async def run_from_channel(self) -> None:
        """Run the jobs of the job channel until cancelled."""
        jobs: set[asyncio.Task[None]] = set()
        while True:
            request = await self._channel.next()
            job = asyncio.create_task(self._run_or_give_back(request), name="job")
            jobs.add(job)
            job.add_done_callback(jobs.discard)

    def cancel(self, request_id: str, reason: str) -> None:
        """End a job that runs, waits or is still to come; it becomes an ERROR with `reason`."""
        if self._lifecycle.cancel(request_id, reason) or self._lifecycle.end_of(request_id):
            return
        self._cancelled_early[request_id] = reason
        if len(self._cancelled_early) > _EARLY:
            del self._cancelled_early[next(iter(self._cancelled_early))]

    def revoke_cancel(self, request_id: str) -> None:
        """Run a job when it comes, although it was cancelled before."""
        self._cancelled_early.pop(request_id, None)

    async def _run_or_give_back(self, request: Request) -> None:
        answer = await self.run(request)
        if "status" not in answer:
            await self._channel.give_back(request)

    async def _run(self, request: Request) -> Answer:
        self._lifecycle.claim(request)
        if (reason := self._cancelled_early.pop(request.id, None)) is not None:
            self._lifecycle.cancel(request.id, reason)
        watching = None
        if self._turn.locked():
            watching = asyncio.create_task(self._watch_current(), name="client of the current job")
        try:
            async with self._turn:
                if watching is not None:
                    watching.cancel()
                return await self._execute(request)
        finally:
            if watching is not None:
                watching.cancel()
            del self._runs[request.id]

    async def _watch_current(self) -> None:
        """Cancel the job that runs once its client has left: its leader, who would do so, may be gone."""
        while True:
            current = self._current
            if current is not None and await self._lifecycle.absent([current]):
                self.cancel(current.id, "The client left.")
            await asyncio.sleep(_LOOK_S)

    async def _execute(self, request: Request) -> Answer:
        self._current = request
        try:
            response = await self._lifecycle.dispatch(request, self._actor)
        except (ClientLeftError, EndedError, ReplicaLostError) as error:
            await self._lifecycle.give_back(request)
            kind = "evicted" if isinstance(error, ReplicaEvictedError) else "lost"
            return {kind: str(error)}
        finally:
            self._current = None
        return _answer(await self._lifecycle.complete(request, response))


def _answer(end: Response) -> Answer:
    return {
        "status": end.status.value,
        "description": end.description[:_DESCRIPTION],
        "delivered": end.delivered,
    }
