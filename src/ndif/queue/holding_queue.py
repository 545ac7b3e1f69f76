"""The queue of requests that come while nothing can run them yet."""

from __future__ import annotations

import asyncio
import logging

from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker
from ndif.stores.responder import Responder

logger = logging.getLogger(__name__)


class HoldingQueue:
    """Hold requests, in order, while the cluster cannot be reached.

    Claims requests from the broker and tells each client why its request waits. The dispatcher takes the
    requests over once there is one.
    """

    def __init__(self, broker: Broker, responder: Responder, text: str) -> None:
        """Take the text that each client is told."""
        self._broker = broker
        self._responder = responder
        self._text = text
        self._requests: list[Request] = []
        self._taking: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Claim requests from now on."""
        if self._taking is None:
            self._taking = asyncio.create_task(self._take(), name="holding queue")

    async def close(self) -> list[Request]:
        """Claim no more; return the requests in the order they came."""
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.wait([self._taking])
        return self._requests

    async def _take(self) -> None:
        while True:
            request = await self._broker.claim()
            self._requests.append(request)
            try:
                await self._responder.respond(
                    request, Response(request.id, Status.QUEUED, self._text)
                )
            except Exception:
                # The request waits all the same.
                logger.exception("request %s could not be told that it waits", request.id)
