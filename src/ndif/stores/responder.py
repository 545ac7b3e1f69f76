"""Delivery of every response to the client that waits for it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import cast
from weakref import WeakValueDictionary

from cachetools import LRUCache

from ndif.runtime.typed_json import to_json
from ndif.schema import wires
from ndif.schema.callback import callback_for, is_notified
from ndif.schema.request import Request
from ndif.schema.response import Response, StoredResult
from ndif.schema.status import Status
from ndif.stores.broker import Broker, BrokerError
from ndif.stores.callbacks import CallbackQueue
from ndif.stores.objects import FileStore, ObjectStore, ObjectStoreError
from ndif.stores.objects.port import end_key, update_key
from ndif.tasks import start

logger = logging.getLogger(__name__)

_USER, _EXPIRES = "user", "expires"
"""Fields of a stored response that are not sent to clients."""
_MAX_NOTIFIED = 10_000
"""Maximum jobs whose last reported status is remembered; others may report a status twice."""
DEFERRABLE = (Status.QUEUED, Status.DISPATCHED, Status.RUNNING)
"""Statuses between a job's receipt and its end, which may be deferred."""
_DEFERRED_S = 0.1
"""Seconds for which a status is deferred: most jobs start and end soon, so that a later one replaces it."""
_WAITS = "The server has started again, and your job waits for its turn."
_LOST = "The server ended before this job was done, and has nothing of it. Send it again."


class Responder:
    """Delivery of responses: on the live channel of a client that has one, else in the object store.

    The responses of one request are delivered in the order of calls. The callers decide which may follow.

    A deferred status reaches a live client 0.1 s later, unless another replaces it: each status costs the
    client and the server as much as the end does. The end is never deferred.
    """

    def __init__(
        self,
        broker: Broker,
        objects: ObjectStore,
        callbacks: CallbackQueue | None = None,
        deferred: Collection[Status] = (),
    ) -> None:
        """Deliver through these stores; without `callbacks`, no webhooks or mails are queued.

        A live job's status may be `deferred` only if all later responses are delivered here too.
        """
        self._broker = broker
        self._objects = objects
        self._callbacks = callbacks
        self._deferred = deferred
        self._held: dict[str, _Held] = {}
        """The deferred status of each job, by job id."""
        self._delivering: set[asyncio.Task[None]] = set()
        self._notified: LRUCache[str, Status] = LRUCache(_MAX_NOTIFIED)
        """The last status that each job's callback reported, if it wants every status."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def problem(self) -> str | None:
        """Return a sentence if the store of responses is known to be nearly full, else None."""
        return self._objects.problem()

    async def sweep(self, *, dry: bool = False) -> Mapping[str, int]:
        """Delete expired responses and results; see `ObjectStore.sweep`."""
        return await self._objects.sweep(dry=dry)

    async def respond(
        self, request: Request, response: Response, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Deliver one response, in the order of calls, unless `unless()` is true when its turn comes.

        A terminal response releases the request with the broker, and no response may follow it.

        Returns:
            False if a live client was not connected to receive the response.

        Raises:
            ObjectStoreError: If the first or the last response for a polling client cannot be stored.
        """
        # Stores are slow: two concurrent responses might arrive in the wrong order.
        turn = self._locks.setdefault(request.id, asyncio.Lock())
        async with turn:
            if unless():
                return True
            if self._is_deferred(request, response):
                self._hold(request, response, unless)
                return not await self._broker.disconnected({request.subscription_id or ""})
            held, heard = self._pop_held(request.id), True
            if held is not None and response.status in (Status.LOG, Status.STREAM):
                await self._broker.publish(request, held.response)
            if request.subscription_id is not None:
                heard = await self._broker.publish(request, response)
                await self._call_back(request, response)
            elif response.status not in (Status.LOG, Status.STREAM):
                # First the webhook or mail: a job whose end is stored does not run again.
                await self._call_back(request, response)
                await self._keep(request, response)
                if response.status.terminal:
                    await self._broker.complete(request, response)
        return heard

    def _is_deferred(self, request: Request, response: Response) -> bool:
        # A webhook that wants every status gets each of them.
        live = request.subscription_id is not None
        return (
            live and response.status in self._deferred and not is_notified(request, response.status)
        )

    def _hold(self, request: Request, response: Response, unless: Callable[[], bool]) -> None:
        """Defer a status; it replaces a deferred one and takes over its timer."""
        held = self._held.get(request.id)
        if held is not None:
            timer = held.timer
        else:
            # Not a closure that refers to itself: the cycle would keep the request's payload in memory.
            loop = asyncio.get_running_loop()
            timer = loop.call_later(_DEFERRED_S, self._deliver_soon, request)
        self._held[request.id] = _Held(response, unless, timer)

    def _deliver_soon(self, request: Request) -> None:
        start(self._deliver(request), self._delivering, "status")

    def _pop_held(self, request_id: str) -> _Held | None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held.timer.cancel()
        return held

    async def _deliver(self, request: Request) -> None:
        async with self._locks.setdefault(request.id, asyncio.Lock()):
            # None if another response was delivered first.
            held = self._pop_held(request.id)
            if held is not None and not held.unless():
                try:
                    await self._broker.publish(request, held.response)
                except BrokerError as error:
                    logger.warning("request %s: a status is not delivered: %s", request.id, error)

    async def ensure_end(self, request: Request, end: Response) -> None:
        """Store `end` for a polling client, unless a terminal response is stored already."""
        async with self._locks.setdefault(request.id, asyncio.Lock()):
            kept = await last_response(self._objects, request.id)
            if kept is None or not kept.status.terminal:
                await self._call_back(request, end)
                await self._keep(request, end)

    async def resume(self, unfinished: Collection[Request]) -> None:
        """Store for each polled job of an earlier process that the job waits or is lost.

        `unfinished` are all jobs that will run.
        """
        for request in unfinished:
            await self.respond(request, Response(request.id, Status.QUEUED, _WAITS))
        if isinstance(self._objects, FileStore):  # a shared store may have another server's jobs
            lost = self._objects.ids("responses") - self._objects.ids("ends")
            for request_id in lost.difference(request.id for request in unfinished):
                end = Response(request_id, Status.ERROR, _LOST)
                fields = wires.envelope_fields(end)  # as on the other wire
                try:
                    update = await last_response(self._objects, request_id)
                    kept = StoredResponse(fields, "" if update is None else update.user)
                    await self._objects.put(end_key(request_id), kept.encode())
                except ObjectStoreError as error:  # a full disk must not prevent a start
                    logger.warning(
                        "request %s is lost, and its end is not stored: %s", request_id, error
                    )

    async def _call_back(self, request: Request, response: Response) -> None:
        """Queue a job's webhook or mail; for a polled job's end, it is delivered once the end is stored.

        A repeated status, as with each new position in the queue, is reported once.
        """
        status = response.status
        if self._callbacks is None or not is_notified(request, status):
            return
        if self._notified.get(request.id) is status:
            return
        if status.terminal:
            self._notified.pop(request.id, None)
        else:
            self._notified[request.id] = status
        try:
            await self._callbacks.add(callback_for(request, response, time.time()))
        except BrokerError as error:  # the job's end matters more
            logger.warning("request %s: its webhook or mail is not queued: %s", request.id, error)

    async def _keep(self, request: Request, response: Response) -> None:
        """Store a response for the client's next poll."""
        content = StoredResponse.of(request, response, self._objects.ttl_s).encode()
        key = (end_key if response.status.terminal else update_key)(request.id)
        try:
            await self._objects.put(key, content, soon=not response.status.terminal)
        except ObjectStoreError as error:
            # Without its first response a job cannot be polled; without its last it has no end.
            if response.status.terminal or response.status is Status.RECEIVED:
                raise
            logger.warning("request %s: %s is not kept: %s", request.id, response.status, error)


@dataclass(frozen=True, slots=True)
class _Held:
    response: Response
    unless: Callable[[], bool]
    timer: asyncio.TimerHandle


@dataclass(frozen=True)
class StoredResponse:
    """A stored response and its recipient."""

    fields: wires.JobUpdate
    """The JSON object that is sent to clients."""
    user: str
    """The user whose key sent the job; empty without a verified key."""
    expires: float | None = None
    """Unix time until which the job's result is kept; None without one."""

    @property
    def status(self) -> Status:
        """Return the response's status."""
        return Status(self.fields["status"])

    @classmethod
    def of(cls, request: Request, response: Response, kept_s: float = 0.0) -> StoredResponse:
        """Return a request's response as it is stored; its result is kept for `kept_s` seconds."""
        # Without a verified key, a polling user cannot be distinguished from others.
        user = request.user if request.key else ""
        expires = time.time() + kept_s if isinstance(response.data, StoredResult) else None
        return cls(wires.fields(request, response), user, expires)

    def encode(self) -> bytes:
        """Return the response as one JSON object, for the store."""
        unsent = {_USER: self.user or None, _EXPIRES: self.expires}
        return to_json({**self.fields, **{k: v for k, v in unsent.items() if v is not None}})

    @classmethod
    def decode(cls, content: bytes) -> StoredResponse:
        """Return the response that `encode` wrote."""
        fields = json.loads(content)
        user, expires = fields.pop(_USER, ""), fields.pop(_EXPIRES, None)
        return cls(cast("wires.JobUpdate", fields), user, expires)


async def last_response(objects: ObjectStore, request_id: str) -> StoredResponse | None:
    """Return the response that a client polls for: the terminal one, or else the last update.

    Updates and ends are separate objects, so that no update can replace an end: neither the update of a
    leader that does not know the end, nor an update that a slow store writes late.
    """
    # A loss of power may leave an empty file, which does not count as an end.
    content = await objects.get(end_key(request_id)) or await objects.get(update_key(request_id))
    return StoredResponse.decode(content) if content else None
