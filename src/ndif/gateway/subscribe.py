"""`/subscribe`: the WebSocket on which nnsight 0.8 hears of its job."""

from __future__ import annotations

import asyncio
import contextlib
import json

from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ndif.gateway.leaving import last_word
from ndif.schema import envelope_wire
from ndif.stores.broker import Broker, Subscription

_MAX_MESSAGE = 1 << 20
_TOO_BIG = 1009
"""The code of RFC 6455, section 7.4.1."""
_GONE = (WebSocketDisconnect, RuntimeError)
"""What it is called that a client is there no longer."""


class Subscribe:
    """The live channel of the envelope wire."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._open: dict[str, WebSocket] = {}

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
            self._open[subscription.session] = websocket
            forwarding = asyncio.create_task(_forward(subscription, websocket))
            while (message := await websocket.receive())["type"] != "websocket.disconnect":
                # A client has nothing to say here.
                if len(message.get("bytes") or message.get("text") or "") > _MAX_MESSAGE:
                    await websocket.close(_TOO_BIG)
                    break
        finally:
            self._open.pop(subscription.session, None)
            await subscription.close()
            if forwarding is not None:
                forwarding.cancel()
                with contextlib.suppress(asyncio.CancelledError, *_GONE):
                    await forwarding

    async def farewell(self) -> None:
        """Tell everybody that nothing more comes."""
        for session, websocket in list(self._open.items()):
            with contextlib.suppress(*_GONE):
                await _send(websocket, envelope_wire.frame(last_word(session)))


async def _forward(subscription: Subscription, websocket: WebSocket) -> None:
    while True:
        await _send(websocket, await subscription.next())


async def _send(websocket: WebSocket, frame: str | bytes) -> None:
    if isinstance(frame, bytes):
        await websocket.send_bytes(frame)
    else:
        await websocket.send_text(frame)
