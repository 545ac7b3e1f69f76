"""`/ws/socket.io`: the Socket.IO channel of nnsight 0.6 and 0.7 (specification, section 3.4)."""

from __future__ import annotations

import asyncio
from typing import Any

import socketio

from ndif.config import Settings
from ndif.gateway.leaving import last_word
from ndif.gateway.responses import is_job_id
from ndif.schema import headers_wire
from ndif.stores.broker import Broker, Subscription

_UPDATE = "blocking_response"
"""The event that clients of this wire wait for."""


class SocketIo:
    """The live channel of the headers wire; a connection's id is its session."""

    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._channels: dict[str, tuple[Subscription, asyncio.Task[None]]] = {}
        self._server = socketio.AsyncServer(
            async_mode="asgi",
            # Whose pages may come in is decided before this, for every route alike.
            cors_allowed_origins="*",
            max_http_buffer_size=settings.socketio_max_http_buffer_size,
            ping_timeout=settings.socketio_ping_timeout,
        )
        self._server.on("connect", self._connect)
        self._server.on("disconnect", self._disconnect)
        self._server.on("stream_upload", self._upload)
        self.app = socketio.ASGIApp(self._server, socketio_path="/ws/socket.io")

    async def _connect(self, sid: str, _environ: Any, _auth: Any = None) -> None:
        subscription = await self._broker.subscribe(sid)
        self._channels[sid] = subscription, asyncio.create_task(self._forward(subscription))

    async def _disconnect(self, sid: str, _reason: Any = None) -> None:
        if channel := self._channels.pop(sid, None):
            subscription, forwarding = channel
            forwarding.cancel()
            await subscription.close()

    async def farewell(self) -> None:
        """Tell everybody that nothing more comes."""
        for sid in list(self._channels):
            await self._server.emit(_UPDATE, headers_wire.frame(last_word(sid)), to=sid)

    async def _upload(self, sid: str, *said: Any) -> None:
        """What a hybrid job's client computed for it: the bytes, and the job's id."""
        match said:
            case (bytes() as content, str() as request_id) if is_job_id(request_id):
                await self._broker.upload(request_id, sid, content)

    async def _forward(self, subscription: Subscription) -> None:
        while True:
            frame = await subscription.next()
            await self._server.emit(_UPDATE, frame, to=subscription.session)
