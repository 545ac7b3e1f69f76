"""Delivery of every response to the client that waits for it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from weakref import WeakValueDictionary

from ndif.schema import wires
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker
from ndif.stores.objects import ObjectStore, ObjectStoreError
from ndif.tasks import start

logger = logging.getLogger(__name__)

_CALLBACK_TIMEOUT_S = 10.0


class Responder:
    """Deliver responses: on the live channel of a client that holds one, else in the object store.

    Keeps the responses of one request in order. Which response may follow which is for its callers to know.
    """

    def __init__(self, broker: Broker, objects: ObjectStore) -> None:
        self._broker = broker
        self._objects = objects
        self._callbacks: set[asyncio.Task[None]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def respond(
        self, request: Request, response: Response, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Deliver one response, in the order of calls, unless `unless()` is true when its turn comes.

        A terminal response releases the request with the broker, and nothing may follow. If the first or
        the last response for a client that polls cannot be stored, that is an `ObjectStoreError`.

        Returns:
            False if a live client was not there to receive the response.
        """
        # A store is slow: two responses under way at once might arrive in the wrong order.
        turn = self._turns.setdefault(request.id, asyncio.Lock())
        async with turn:
            if unless():
                return True
            heard = True
            if request.subscription_id is not None:
                heard = await self._broker.publish(request, response)
            elif response.status not in (Status.LOG, Status.STREAM):
                await self._keep(request, response)
                if response.status.terminal:
                    await self._broker.complete(request, response)
        if request.callback and response.status.terminal:
            # Not awaited: a client's slow endpoint delays nobody else.
            start(_call_back(request, response), self._callbacks, "callback")
        return heard

    async def ensure_end(self, request: Request, end: Response) -> None:
        """Store `end` for a client that polls, unless a terminal response is stored already."""
        async with self._turns.setdefault(request.id, asyncio.Lock()):
            kept = await last_response(self._objects, request.id)
            if kept is None or not Status(json.loads(kept)["status"]).terminal:
                await self._keep(request, end)

    async def _keep(self, request: Request, response: Response) -> None:
        """Store a response for the client's next poll."""
        content = json.dumps(wires.fields(request, response)).encode()
        key = (_end_key if response.status.terminal else _update_key)(request.id)
        try:
            await self._objects.put(key, content, soon=not response.status.terminal)
        except ObjectStoreError as error:
            # Without its first response a job cannot be polled, without its last it has no end.
            if response.status.terminal or response.status is Status.RECEIVED:
                raise
            logger.warning("request %s: %s is not kept: %s", request.id, response.status, error)


async def last_response(objects: ObjectStore, request_id: str) -> bytes | None:
    """Return the response that a client polls for, as JSON: the terminal one, or else the last update.

    The two are separate objects, so that no update can hide an end: not one of a leader that does not know
    of it, nor one that a slow store writes late.
    """
    end = await objects.get(_end_key(request_id))
    return end if end is not None else await objects.get(_update_key(request_id))


def _end_key(request_id: str) -> str:
    return f"ends/{request_id}.json"


def _update_key(request_id: str) -> str:
    return f"responses/{request_id}.json"


async def _call_back(request: Request, response: Response) -> None:
    import httpx

    try:
        async with httpx.AsyncClient(timeout=_CALLBACK_TIMEOUT_S) as client:
            # `params=` would replace the query that the address has itself.
            url = httpx.URL(request.callback).copy_merge_params(
                {"status": response.status.value, "id": request.id}
            )
            await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        logger.warning("request %s: its callback failed: %s", request.id, error)
