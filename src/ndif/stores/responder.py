"""Delivers every update of a request to whoever waits for it (specification, sections 8.2 and 8.5)."""

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

logger = logging.getLogger(__name__)

_CALLBACK_TIMEOUT_S = 10.0


class Responder:
    """The live channel for a client that holds one; the object store for one that polls."""

    def __init__(self, broker: Broker, objects: ObjectStore) -> None:
        self._broker = broker
        self._objects = objects
        self._callbacks: set[asyncio.Task[None]] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def respond(
        self, request: Request, response: Response, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Deliver one update, in the order of calls, unless `unless` when its turn comes.

        Whether somebody waits for it: who polls does. With a terminal one the request is let go of, and
        nothing may follow.

        Raises:
            ObjectStoreError: if the first or the last response of a polled job cannot be kept.
        """
        # A store is slow: two updates under way at once might land the wrong way round.
        turn = self._turns.setdefault(request.id, asyncio.Lock())
        async with turn:
            if unless():
                return True
            heard = True
            if request.session is not None:
                heard = await self._broker.publish(request, response)
            elif response.status not in (Status.LOG, Status.STREAM):
                await self._keep(request, response)
                if response.status.terminal:
                    await self._broker.conclude(request, response)
        if request.callback and response.status.terminal:
            # Not awaited: a client's slow endpoint delays nobody else.
            task = asyncio.create_task(_call_back(request, response))
            self._callbacks.add(task)
            task.add_done_callback(self._callbacks.discard)
        return heard

    async def see_told(self, request: Request, otherwise: Response) -> None:
        """Have the next poll for a request that has ended find an end.

        While it ended where another leader had sent it, it waited in this one's line, and its client may
        have been told so after that.

        Raises:
            ObjectStoreError: if that cannot be known, or not be kept.
        """
        if request.session is not None:
            return
        async with self._turns.setdefault(request.id, asyncio.Lock()):
            kept = await self._objects.get(_key_of(request))
            if kept is None or not Status(json.loads(kept)["status"]).terminal:
                await self._keep(request, otherwise)

    async def _keep(self, request: Request, response: Response) -> None:
        """Have the client's next poll find this."""
        content = json.dumps(wires.fields(request, response)).encode()
        try:
            await self._objects.put(_key_of(request), content, soon=not response.status.terminal)
        except ObjectStoreError as error:
            # Without its first response a job cannot be asked for, without its last it has no end.
            if response.status.terminal or response.status is Status.RECEIVED:
                raise
            logger.warning("request %s: %s is not kept: %s", request.id, response.status, error)


def _key_of(request: Request) -> str:
    return f"responses/{request.id}.json"


async def _call_back(request: Request, response: Response) -> None:
    import httpx

    try:
        async with httpx.AsyncClient(timeout=_CALLBACK_TIMEOUT_S) as client:
            # `params=` would put them in the place of what the address asks for itself.
            url = httpx.URL(request.callback).copy_merge_params(
                {"status": response.status.value, "id": request.id}
            )
            await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        logger.warning("request %s: its callback failed: %s", request.id, error)
