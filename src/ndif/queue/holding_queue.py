"""The waiting room: where requests are while there is nothing yet that could run them."""

from __future__ import annotations

import asyncio
import logging

from ndif.queue.responder import Responder
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker

logger = logging.getLogger(__name__)


class WaitingRoom:
    """Takes requests from the broker once it is opened, tells each why it waits, and keeps their order."""

    def __init__(self, broker: Broker, responder: Responder, text: str) -> None:
        """`text`: what each is told."""
        self._broker = broker
        self._responder = responder
        self._text = text
        self._requests: list[Request] = []
        self._taking: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Take them, from now on."""
        if self._taking is None:
            self._taking = asyncio.create_task(self._take(), name="waiting room")

    async def close(self) -> list[Request]:
        """Take no more; those that waited, the first first."""
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
                # It waits all the same.
                logger.exception("request %s could not be told that it waits", request.id)
