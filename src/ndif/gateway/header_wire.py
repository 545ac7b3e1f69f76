"""The wire of nnsight 0.6 and 0.7: a request in HTTP headers and its body, updates over Socket.IO."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import socketio
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from ndif.config.settings import Settings
from ndif.gateway.caller import caller_of, subscription_of
from ndif.gateway.connections import DOES_NOT_READ, TAKES_LARGE, disconnect, unconfirmed_bytes
from ndif.gateway.envelope_wire import Envelope
from ndif.gateway.http_error import HttpError
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.openapi import DescribedChannel
from ndif.gateway.results import is_job_id
from ndif.gateway.socket_io_channel import Acknowledgements, SocketIoChannel
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.wires import header_frame
from ndif.stores.broker import Broker, Subscription

_MAX_QUOTED = 100
"""Characters of a header that an answer repeats."""


def read_headers(headers: Headers) -> Envelope:
    """Read the headers of `POST /request`; raise an `HttpError` (400) for a wrong one."""
    compress = headers.get("nnsight-compress", "True")
    if compress not in ("True", "False"):
        raise HttpError(
            400,
            f"The header nnsight-compress must be True or False, not {compress[:_MAX_QUOTED]!r}.",
        )
    return Envelope(
        model_key=headers["nnsight-model-key"],
        session_id=headers.get("ndif-session_id", ""),
        compress=compress == "True",
    )


class _Packet(socketio.packet.Packet):  # type: ignore[misc]
    """A packet with at most one attachment; clients of this wire send no more."""

    def decode(self, encoded_packet: Any) -> Any:
        # The server keeps a packet until all of its attachments have arrived: more could fill its memory.
        if (count := super().decode(encoded_packet)) > 1:
            raise ValueError("a packet has one attachment at most")
        return count


class _Server(socketio.AsyncServer):  # type: ignore[misc]
    """A server that disconnects a client for a malformed packet."""

    async def _handle_eio_message(self, eio_sid: str, data: Any) -> None:
        try:
            await super()._handle_eio_message(eio_sid, data)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            disconnect(self.environ[eio_sid]["asgi.scope"], f"it sent an invalid packet: {error}")


CHANNEL = DescribedChannel(
    "/ws/socket.io (live updates of nnsight 0.6 and 0.7)",
    "Socket.IO 5 over a WebSocket (`/ws/socket.io/?EIO=4&transport=websocket`); there is no polling. "
    "Socket.IO gives the client the connection's id. The updates of jobs with this id as `ndif-session_id` "
    "are sent here.\n\n"
    "Every update is an event `blocking_response` with bytes in the format of `torch.save`: a dict with "
    "`id`, `status`, `description` and, with COMPLETED, `data`. With STREAM, `data` is a function that the "
    "client runs; it answers with an event `stream_upload` of two values: the bytes and the job's id.\n\n"
    "A job whose only channel closes is ended.",
)


class SocketIoSubscriptions:
    """The subscriptions of clients at `/ws/socket.io`.

    Opens one broker subscription per connection and forwards its frames. Clients send no key here: a
    channel belongs to the caller's name, and the key is checked with every job.
    """

    def __init__(self, broker: Broker, channels: OpenChannels, settings: Settings) -> None:
        self._broker = broker
        self._channels = channels
        self._max_unread_bytes = settings.max_unread_bytes
        self._open: dict[str, _Connection] = {}
        self._server = _Server(
            async_mode="asgi",
            client_manager=Acknowledgements(self._acknowledge),
            # `SameOrigin` has already checked the page's origin.
            cors_allowed_origins="*",
            max_http_buffer_size=settings.socketio_max_http_buffer_size,
            # No released client polls.
            transports=["websocket"],
            serializer=_Packet,
            # Back-pressure: read no further message while an upload is being stored.
            async_handlers=False,
            ping_timeout=settings.socketio_ping_timeout,
        )
        self._server.on("connect", self._connect)
        self._server.on("disconnect", self._disconnect)
        self._server.on("stream_upload", self._upload)
        self.app = socketio.ASGIApp(self._server, socketio_path="/ws/socket.io")

    async def fail_all(self, description: str) -> None:
        """Send every subscribed client an ERROR with this description for each of its unfinished jobs."""
        for connection in (connections := list(self._open.values())):
            for request_id in list(connection.subscription.unfinished):
                connection.channel.put(
                    header_frame(Response(request_id, Status.ERROR, description))
                )
        await asyncio.gather(*(connection.channel.sent() for connection in connections))

    async def _connect(self, sid: str, environ: Any, _auth: Any = None) -> bool:
        scope = environ["asgi.scope"]
        state = scope.setdefault("state", {})
        if TAKES_LARGE in state:  # it has a subscription already
            return False
        state[TAKES_LARGE] = lambda: False
        caller = caller_of(HTTPConnection(scope))
        with ExitStack() as counted:
            try:
                counted.enter_context(self._channels.count(caller))
            except HttpError as error:
                raise socketio.exceptions.ConnectionRefusedError(error.detail) from error
            subscription = await self._broker.subscribe(subscription_of(sid, caller.name))
            # Only a running job asks its client for an upload, which may be large.
            state[TAKES_LARGE] = lambda: bool(subscription.unfinished)
            subscription.bound(self._max_unread_bytes, partial(disconnect, scope, DOES_NOT_READ))
            channel = SocketIoChannel(self._server, sid, partial(unconfirmed_bytes, scope))
            coroutines = [channel.run(), _forward(subscription, channel)]
            tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
            self._open[sid] = _Connection(subscription, channel, tasks, counted.pop_all())
        return True

    async def _disconnect(self, sid: str, _reason: Any = None) -> None:
        if connection := self._open.pop(sid, None):
            try:
                await connection.subscription.close()
            finally:
                connection.counted.close()
                for task in connection.tasks:  # last, since one of them may be the caller
                    task.cancel()

    def _acknowledge(self, sid: str) -> None:
        if connection := self._open.get(sid):
            connection.channel.acknowledge()

    async def _upload(self, sid: str, *arguments: Any) -> None:
        """Store a hybrid job's upload: its bytes and the job's id. Ignore other arguments."""
        match arguments:
            case (bytes() as content, str() as request_id) if is_job_id(request_id):
                if connection := self._open.get(sid):
                    await self._broker.upload(request_id, connection.subscription.id, content)


@dataclass(frozen=True, slots=True)
class _Connection:
    subscription: Subscription
    channel: SocketIoChannel
    tasks: list[asyncio.Task[None]]
    counted: ExitStack
    """Holds the connection's place in `OpenChannels` until closed."""


async def _forward(subscription: Subscription, channel: SocketIoChannel) -> None:
    while True:
        # Updates wait in the subscription, which bounds their bytes.
        await channel.until_takes_more()
        frame = await subscription.next()
        # Text belongs to a request of the other wire that names this subscription.
        if isinstance(frame, bytes):
            channel.put(frame)
