"""A replica for leaders in other processes: they come and go, and what it runs goes on.

Whoever leads asks; what is asked twice is done once. No update and no result passes through a leader: the
replica delivers them itself, and answers in a few words that can be lost without harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ndif.host.port import Actor, ActorError, ReplicaEvictedError, ReplicaLostError
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker.encoding import decode_request
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


class Replica:
    """One `Actor` beside the stores of its node."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        """`said`: what whoever made it says of it, for whoever leads next; of that its `place` changes."""
        self._said = {**said, "place": dict(said["place"])}
        self._actor: Actor | None = None
        self._equipment: Equipment
        self._starting: asyncio.Task[Answer] | None = None
        self._progress = (0, 0)
        self._progressed = asyncio.Event()
        self._over = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._attending: asyncio.Task[None] | None = None
        self._level: str | None = None
        self._moving = False
        self._turn = asyncio.Lock()
        self._current: Request | None = None
        self._runs: dict[str, asyncio.Task[Answer]] = {}
        self._cancelled: dict[str, str] = {}
        self._ended: dict[str, tuple[Answer, Response]] = {}

    async def prepare(self) -> Equipment:
        """What it needs.

        Raises:
            ActorError: if this node is not set up for it.
        """
        raise NotImplementedError

    async def describe(self) -> Answer:
        """All that a leader needs who finds it."""
        return {
            **self._said,
            "level": self._level,
            "moving": self._moving,
            "ended": self._over.is_set(),
            "model": dict(self._actor.model) if self._actor is not None else {},
            "requests": [*self._runs, *self._ended],
        }

    # Its life

    async def start(self) -> Answer:
        """COLD to HOT: the loaded `model`, or the `error`."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def _start(self) -> Answer:
        try:
            self._equipment = await self.prepare()
            self._actor = self._equipment.actor
            self._watching = asyncio.create_task(self._watch(self._actor), name="end")
            if self._over.is_set():
                raise ActorError("the replica was ended before it was loaded")  # noqa: TRY301
            await self._actor.start(self._note)
            self._attending = asyncio.create_task(self._attend(), name="jobs")
        except (ActorError, BrokerError, ObjectStoreError) as error:
            self._over.set()
            return {"error": str(error)}
        finally:
            self._progressed.set()
        return self._came_up(self._actor)

    def _came_up(self, actor: Actor) -> Answer:
        self._level, self._said["place"]["deployed"] = "HOT", time.time()
        return {"model": dict(actor.model)}

    def _holds(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        self._said["place"]["gpu_mem_bytes_by_id"] = dict(gpu_mem_bytes_by_id)

    def _note(self, done: int, total: int) -> None:
        self._progress = done, total
        self._progressed.set()

    async def progress(self, known: tuple[int, int]) -> tuple[int, int]:
        """What is loaded and all there is to load, once it is not what is `known`."""
        while self._progress == tuple(known):
            self._progressed.clear()
            await self._progressed.wait()
        return self._progress

    async def to_cache(self) -> None:
        """HOT to WARM. See `Actor.to_cache`."""
        if self._actor is None or self._level == "WARM":
            return
        self._moving = True
        await self._actor.to_cache()
        self._holds({})
        self._level, self._moving = "WARM", False

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> Answer:
        """WARM to HOT: the loaded `model`, or the `error`. See `Actor.from_cache`."""
        if self._actor is None:
            return {"error": "the replica was not started"}
        if self._level == "HOT":
            return {"model": dict(self._actor.model)}
        self._moving = True
        try:
            await self._actor.from_cache(gpu_mem_bytes_by_id)
        except ActorError as error:
            return {"error": str(error)}
        self._holds(gpu_mem_bytes_by_id)
        self._moving = False
        return self._came_up(self._actor)

    async def stop(self) -> None:
        """End it. A request that runs is evicted."""
        self._over.set()
        if self._actor is not None:
            await self._actor.stop()

    async def _watch(self, actor: Actor) -> None:
        await actor.ended.wait()
        self._over.set()
        if self._attending is not None:
            self._attending.cancel()

    async def until_ended(self) -> None:
        """Return once it is good for nothing any more."""
        await self._over.wait()

    # Its requests

    async def run(self, content: bytes, *, inherited: bool = False) -> Answer:
        """Bring a request to its end: how it ended, or that it was `lost` or `evicted`.

        One that runs already, or has run, is not run again; one that comes meanwhile waits. `inherited`:
        whether another leader sent it first.
        """
        request = decode_request(content)
        if inherited and (known := self._ended.get(request.id)) is not None:
            await self._tell_again(request, *known)
        return await self._bring_to_its_end(request)

    async def _attend(self) -> None:
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

    async def cancel(self, request_id: str, reason: str) -> None:
        """End a request that runs, waits or is on its way here; it becomes an ERROR with `reason`."""
        if self._actor is not None and self._current and self._current.id == request_id:
            self._actor.cancel(reason)
        elif request_id not in self._ended:
            _remember(self._cancelled, request_id, reason)

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
                await self.cancel(current.id, "The client left.")
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
        if self._actor is None:
            raise ReplicaLostError("the replica was not started")
        if (reason := self._cancelled.get(request.id)) is not None:
            return Response(request.id, Status.ERROR, reason)

        async def respond(response: Response) -> bool:
            if response.status is Status.DISPATCHED:  # whoever leads has said so
                return True
            return await self._equipment.deliver(request, response)

        self._current = request
        try:
            return await self._actor(request, respond)
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
