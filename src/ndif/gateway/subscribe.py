"""`/subscribe`: the WebSocket on which nnsight 0.8 hears of its job."""

from __future__ import annotations

import asyncio
import contextlib
import json

from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ndif.stores.broker import Broker, Subscription

_MAX_MESSAGE = 1 << 20
_TOO_BIG = 1009
"""The code of RFC 6455, section 7.4.1."""


class Subscribe:
    """The live channel of the envelope wire."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def routes(self) -> list[BaseRoute]:
        """Where it answers."""
        return [WebSocketRoute("/subscribe", self.subscribe)]

    async def subscribe(self, websocket: WebSocket) -> None:
        """Name a session, then forward its updates until the client leaves."""
        await websocket.accept()
        subscription = await self._broker.subscribe()
        forwarding = None
        try:
            await websocket.send_text(json.dumps({"session_id": subscription.session}))
            forwarding = asyncio.create_task(_forward(subscription, websocket))
            while (message := await websocket.receive())["type"] != "websocket.disconnect":
                # A client has nothing to say here.
                if len(message.get("bytes") or message.get("text") or "") > _MAX_MESSAGE:
                    await websocket.close(_TOO_BIG)
                    break
        finally:
            await subscription.close()
            if forwarding is not None:
                forwarding.cancel()
                with contextlib.suppress(asyncio.CancelledError, WebSocketDisconnect, RuntimeError):
                    await forwarding


async def _forward(subscription: Subscription, websocket: WebSocket) -> None:
    while True:
        frame = await subscription.next()
        if isinstance(frame, bytes):
            await websocket.send_bytes(frame)
        else:
            await websocket.send_text(frame)
