"""The jobs of one replica: each is run once, one at a time, and told its end.

Whoever leads asks for it; what is asked twice is done once. No update and no result passes through a
leader: they are delivered from here, and the answer is a few words that can be lost without harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ndif.host.port import Actor, ReplicaEvictedError, ReplicaLostError
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.port import BrokerError
from ndif.stores.objects import ObjectStoreError

logger = logging.getLogger(__name__)

Answer = dict[str, Any]
T = TypeVar("T")

_REMEMBERED = 1000
"""How many jobs it knows to have ended, or not to be wanted: whoever leads may not have heard of that."""
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Equipment:
    """What a replica works with on its node."""

    actor: Actor
    """Not started."""
    deliver: Callable[[Request, Response], Awaitable[bool]]
    """An update, to its client; whether anybody waits for it."""
    has_left: Callable[[Request], Awaitable[bool]]
    """Whether its client has."""
    next_job: Callable[[], Awaitable[Request]]
    """The next of those that come by the quick way, which are heard of as what is delivered."""
    give_back: Callable[[Request], Awaitable[None]]
    """Such a one that came to no end here."""


class Jobs:
    """What is asked of a replica that has what it needs."""

    def __init__(self, equipment: Equipment) -> None:
        self._equipment = equipment
        self._turn = asyncio.Lock()
        self._current: Request | None = None
        self._runs: dict[str, asyncio.Task[Answer]] = {}
        self._cancelled: dict[str, str] = {}
        self._ended: dict[str, tuple[Answer, Response]] = {}

    @property
    def known(self) -> list[str]:
        """The ids of those that run, wait, or have ended not long ago."""
        return [*self._runs, *self._ended]

    async def run(self, request: Request, *, inherited: bool = False) -> Answer:
        """Bring a request to its end: how it ended, or that it was `lost` or `evicted`.

        One that runs already, or has run, is not run again; one that comes meanwhile waits. `inherited`:
        whether another leader sent it first.
        """
        if inherited and (known := self._ended.get(request.id)) is not None:
            await self._tell_again(request, *known)
        return await self._bring_to_its_end(request)

    async def attend(self) -> None:
        """Run what comes by the quick way."""
        jobs: set[asyncio.Task[None]] = set()
        while True:
            request = await self._equipment.next_job()
            job = asyncio.create_task(self._attend_to(request), name="job")
            jobs.add(job)
            job.add_done_callback(jobs.discard)

    async def _attend_to(self, request: Request) -> None:
        answer = await self._bring_to_its_end(request)
        if "status" not in answer:
            await self._equipment.give_back(request)

    async def _bring_to_its_end(self, request: Request) -> Answer:
        if (known := self._ended.get(request.id)) is not None:
            return known[0]
        if request.id not in self._runs:
            self._runs[request.id] = asyncio.create_task(self._run(request), name=request.id)
        return await asyncio.shield(self._runs[request.id])

    def cancel(self, request_id: str, reason: str) -> None:
        """End a request that runs, waits or is on its way here; it becomes an ERROR with `reason`."""
        if self._current is not None and self._current.id == request_id:
            self._equipment.actor.cancel(reason)
        elif request_id not in self._ended:
            _remember(self._cancelled, request_id, reason)

    def spare(self, request_id: str) -> None:
        """Do not end a request that is not here yet, whatever was said of it."""
        if request_id not in self._runs:
            self._cancelled.pop(request_id, None)

    async def _tell_again(self, request: Request, answer: Answer, response: Response) -> None:
        """Have the client that polls find its result: it was put in a line again meanwhile, and told so."""
        if request.session is None and answer["delivered"]:
            await self._equipment.deliver(request, response)

    async def _run(self, request: Request) -> Answer:
        try:
            if self._turn.locked():
                return await self._wait_and_execute(request)
            async with self._turn:
                return await self._execute(request)
        finally:
            del self._runs[request.id]
            self._cancelled.pop(request.id, None)

    async def _wait_and_execute(self, request: Request) -> Answer:
        seeing_off = asyncio.create_task(self._see_off(), name="jobs without a client")
        try:
            async with self._turn:
                seeing_off.cancel()
                return await self._execute(request)
        finally:
            seeing_off.cancel()

    async def _see_off(self) -> None:
        """While one waits, see that what runs has a client: whoever led when it began may be gone."""
        while True:
            current = self._current
            if current is not None and await self._equipment.has_left(current):
                self.cancel(current.id, "The client left.")
            await asyncio.sleep(_LOOK_S)

    async def _execute(self, request: Request) -> Answer:
        try:
            response = await self._respond(request)
        except ReplicaEvictedError as error:
            return {"evicted": str(error)}
        except ReplicaLostError as error:
            return {"lost": str(error)}
        try:
            await self._equipment.deliver(request, response)
        except Exception:
            logger.exception("request %s could not be told its end", request.id)
            said = "The job ended, and its result could not be delivered."
            response = Response(request.id, Status.ERROR, said)
            answer = _answer(response, delivered=False)
        else:
            answer = _answer(response, delivered=True)
        # What rode on a live channel nobody waits for any more.
        kept = response if request.session is None else Response(request.id, response.status)
        _remember(self._ended, request.id, (answer, kept))
        return answer

    async def _respond(self, request: Request) -> Response:
        """The last response.

        Raises:
            ReplicaLostError: if the replica ended, or was evicted.
        """
        if (reason := self._cancelled.get(request.id)) is not None:
            return Response(request.id, Status.ERROR, reason)

        async def respond(response: Response) -> bool:
            if response.status is Status.DISPATCHED:  # whoever leads has said so
                return True
            return await self._equipment.deliver(request, response)

        self._current = request
        try:
            return await self._equipment.actor(request, respond)
        except ReplicaLostError:
            raise
        except (BrokerError, ObjectStoreError) as error:
            logger.error("request %s: %s", request.id, error)  # noqa: TRY400 - a sentence
            return Response(request.id, Status.ERROR, f"The job could not be run: {error}.")
        except Exception:
            # A defect of ours must cost one request.
            logger.exception("request %s failed", request.id)
            said = "The server failed while it ran this job; its log says why."
            return Response(request.id, Status.ERROR, said)
        finally:
            self._current = None


def _remember(known: dict[str, T], request_id: str, what: T) -> None:
    known[request_id] = what
    if len(known) > _REMEMBERED:
        del known[next(iter(known))]


def _answer(response: Response, *, delivered: bool) -> Answer:
    return {
        "status": response.status.value,
        "description": response.description[:200],
        "delivered": delivered,
    }
