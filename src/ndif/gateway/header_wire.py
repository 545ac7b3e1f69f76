"""The wire of nnsight 0.6 and 0.7: a request in HTTP headers and its body, updates over Socket.IO."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import socketio
from starlette.datastructures import Headers

from ndif.config.settings import Settings
from ndif.gateway.connections import DOES_NOT_READ, TAKES_LARGE, disconnect
from ndif.gateway.http_error import HttpError
from ndif.gateway.results import is_job_id
from ndif.schema.request import Submission
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.wires import header_frame
from ndif.stores.broker import Broker, Subscription

_UPDATE = "blocking_response"
"""The event that clients of this wire wait for."""
_MAX_QUOTED = 100
"""Characters of a header that an answer repeats."""


def read_headers(headers: Headers) -> Submission:
    """Return what the headers of `POST /request` say, or raise an `HttpError`; its body is the payload."""
    compress = headers.get("nnsight-compress", "True")
    if compress not in ("True", "False"):
        raise HttpError(
            400,
            f"The header nnsight-compress must be True or False, not {compress[:_MAX_QUOTED]!r}.",
        )
    callback = headers.get("ndif-callback", "")
    if callback and not callback.startswith(("http://", "https://")):
        raise HttpError(
            400, f"The callback must be an http or https URL, not {callback[:_MAX_QUOTED]!r}."
        )
    return Submission(
        headers["nnsight-model-key"],
        subscription_id=headers.get("ndif-session_id") or None,
        compress=compress == "True",
        callback=callback,
    )


class _Packet(socketio.packet.Packet):  # type: ignore[misc]
    """A packet with what clients of this wire send: at most one attachment."""

    def decode(self, encoded_packet: Any) -> Any:
        """See `Packet`. A packet is kept until all of its attachments have arrived."""
        if (count := super().decode(encoded_packet)) > 1:
            raise ValueError("a packet has one attachment at most")
        return count


class _Server(socketio.AsyncServer):  # type: ignore[misc]
    """A server that ends the connection of a client that does not speak its protocol."""

    async def _handle_eio_message(self, eio_sid: str, data: Any) -> None:
        try:
            await super()._handle_eio_message(eio_sid, data)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            disconnect(self.environ[eio_sid]["asgi.scope"], f"it sends what is no packet: {error}")


class SocketIoSubscriptions:
    """The subscriptions of clients at `/ws/socket.io`.

    Opens one broker subscription per connection, under the connection's id, and forwards its frames.
    """

    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._max_unread_bytes = settings.max_unread_bytes
        self._open: dict[str, tuple[Subscription, asyncio.Task[None]]] = {}
        self._server = _Server(
            async_mode="asgi",
            # The middleware `SameOrigin` decides for every route which pages may connect.
            cors_allowed_origins="*",
            max_http_buffer_size=settings.socketio_max_http_buffer_size,
            # No released client polls.
            transports=["websocket"],
            serializer=_Packet,
            # Nothing more is read while an upload is on its way to the broker.
            async_handlers=False,
            ping_timeout=settings.socketio_ping_timeout,
        )
        self._server.on("connect", self._connect)
        self._server.on("disconnect", self._disconnect)
        self._server.on("stream_upload", self._upload)
        self.app = socketio.ASGIApp(self._server, socketio_path="/ws/socket.io")

    async def fail_all(self, description: str) -> None:
        """Send every subscribed client an ERROR with this description for each of its unfinished jobs."""
        for sid, (subscription, _) in list(self._open.items()):
            for request_id in list(subscription.unfinished):
                frame = header_frame(Response(request_id, Status.ERROR, description))
                await self._server.emit(_UPDATE, frame, to=sid)

    async def _connect(self, sid: str, environ: Any, _auth: Any = None) -> bool:
        scope = environ["asgi.scope"]
        state = scope.setdefault("state", {})
        if TAKES_LARGE in state:  # a connection has one subscription
            return False
        state[TAKES_LARGE] = lambda: False
        subscription = await self._broker.subscribe(sid)
        # Only a job's block asks its client for results.
        state[TAKES_LARGE] = lambda: bool(subscription.unfinished)
        subscription.bound(self._max_unread_bytes, partial(disconnect, scope, DOES_NOT_READ))
        self._open[sid] = subscription, asyncio.create_task(self._forward(subscription))
        return True

    async def _disconnect(self, sid: str, _reason: Any = None) -> None:
        if opened := self._open.pop(sid, None):
            subscription, forwarding = opened
            forwarding.cancel()
            await subscription.close()

    async def _upload(self, sid: str, *arguments: Any) -> None:
        """Store what a hybrid job's client computed: the bytes, and the job's id."""
        match arguments:
            case (bytes() as content, str() as request_id) if is_job_id(request_id):
                await self._broker.upload(request_id, sid, content)

    async def _forward(self, subscription: Subscription) -> None:
        while True:
            frame = await subscription.next()
            await self._server.emit(_UPDATE, frame, to=subscription.id)
            with contextlib.suppress(KeyError):  # it is gone
                # The next frame waits here, where it is counted, until the client reads this one.
                await self._connection(subscription.id).queue.join()

    def _connection(self, sid: str) -> Any:
        """Return the Engine.IO socket of a client, or raise a `KeyError`."""
        return self._server.eio.sockets[self._server.manager.eio_sid_from_sid(sid, "/")]
