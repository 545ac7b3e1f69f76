"""uvicorn's connections with limits that it lacks: on unfinished input, and on unread output."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import termios
from collections.abc import Callable
from fcntl import ioctl
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.types import Scope
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from ndif.gateway.connection_limit import Allowance, ConnectionLimit
from ndif.gateway.http_error import RETRY_SOON, HttpError, written
from ndif.gateway.incoming import MAX_ENVELOPE, Incoming, IncomingFullError
from ndif.gateway.peer import PEER, Peer
from ndif.gateway.request_log import REQUEST_ID
from ndif.telemetry.request_id import HEADER, RequestId, naming

logger = logging.getLogger(__name__)

_UNLIMITED_S = 86_400.0 * 365
_MAX_HEAD = 128 * 1024
"""Bytes of a request's line and headers."""
_MAX_TARGET = 64 * 1024
"""Bytes of a request's path and query."""
_MAX_HEADERS = 256
"""Header lines of a request; a line costs more memory than its bytes."""
_NOT_HTTP = HttpError(400, "The request is not valid HTTP.")
_LONG_TARGET = HttpError(414, "The request's address is too long: send its data in a body.")
_LARGE_HEAD = HttpError(
    431, f"The request's headers are too large: there may be {_MAX_HEAD >> 10} KiB of them."
)
_MANY_HEADERS = HttpError(
    431, f"The request has too many headers: there may be {_MAX_HEADERS} of them."
)
_AMBIGUOUS_HOST = HttpError(400, "The request has several Host headers: send one.")
_AMBIGUOUS_LENGTH = HttpError(
    400,
    "A body without Content-Length must be sent by HTTP/1.1 with Transfer-Encoding: chunked alone.",
)
_LATE_HEADER = HttpError(
    400, "A header of this name may not follow the body (as a trailer): send it before the body."
)
_OF_HEAD = (
    *(b"host", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding"),
    *(b"connection", b"upgrade", b"expect", b"range", b"if-", b"origin", b"sec-", b"forwarded"),
    *(b"authorization", b"cookie", b"x-forwarded-", b"x-request-id", b"access-control-"),
    *(b"traceparent", b"ndif-", b"nnsight-", b"python-version"),
)
"""First letters of the headers that this server, or a proxy before it, acts on."""
_NO_HANDSHAKE = HttpError(
    400,
    "This request opens no WebSocket: it must be a GET with at most 128 headers, each of at most 8 KiB.",
)
_TOO_MANY = HttpError(
    503, "This server has as many connections as it can. Try again soon.", RETRY_SOON
)
_FAILED = HttpError(500, "The server failed at this request; its log says why.")
_KEPT_HEADERS = ("Allow", "Upgrade")
"""Headers that the refusal of an invalid handshake copies from the answer of `websockets`."""
_USER_TIMEOUT_MS = 300_000
"""`TCP_USER_TIMEOUT` of a WebSocket: the kernel closes it if sent data stays unacknowledged for longer."""
_SLICE = 4096
"""Bytes of a WebSocket's input that are parsed at once: up to 680 frames."""
_LARGE_SLICE = 32 * 1024
"""Bytes that are parsed at once of a large frame."""
_SUSPECT_SLICE = 256
"""Bytes that are parsed at once if the client's network is suspect: it may connect again and again."""
_FRAMES_PER_S, _FRAME_BURST, _SUSPECT_BURST = 1000.0, 500.0, 20.0
"""Small frames that a WebSocket's client may send; above that it is disconnected."""
_CHUNKS_PER_S, _CHUNK_BURST = 10.0, 50.0
"""Small pieces in which a body may arrive; above that the server reads it less often, in larger pieces."""
_FRAGMENT_BYTES = 100
"""Memory of a message's fragment, in bytes, in addition to its content."""
_TOO_BIG, _TRY_AGAIN, _POLICY = 1009, 1013, 1008
"""Close codes of RFC 6455, section 7.4.1."""
TAKES_LARGE = "takes_large_messages"
"""Key in a WebSocket's state: the application's function that returns True to allow large messages."""
DOES_NOT_READ = "its client leaves more than NDIF_MAX_UNREAD_BYTES of updates unread"
_DISCONNECT = "disconnect"
"""Key in a WebSocket's state: a function that ends the connection at once and logs a reason."""
_ON_ITS_WAY = "on_its_way"
"""Key in a WebSocket's state: a function that returns the number of unconfirmed bytes."""


def disconnect(scope: Scope, reason: str) -> None:
    """Abort a WebSocket's connection without a closing handshake, and log the reason."""
    if (end := scope.get("state", {}).get(_DISCONNECT)) is not None:
        end(reason)


def unconfirmed_bytes(scope: Scope) -> int:
    """Return the number of bytes sent to a WebSocket's client that its machine has not confirmed."""
    unconfirmed = scope.get("state", {}).get(_ON_ITS_WAY)
    return 0 if unconfirmed is None else int(unconfirmed())


def limited(incoming: Incoming, connections: ConnectionLimit) -> dict[str, Any]:
    """Return the options that make `uvicorn.Config` use `HttpConnection` and `WebSocketConnection`."""
    return {
        "http": partial(HttpConnection, incoming=incoming, limit=connections),
        "ws": partial(WebSocketConnection, incoming=incoming, limit=connections),
        # A client of nnsight 0.8 answers pings only while it waits for an update: not during an upload, nor
        # before the update is awaited. `TCP_USER_TIMEOUT` detects a dead machine instead.
        "ws_ping_timeout": None,
    }


class _Watchdog:
    """A watchdog that calls `give_up` if progress stops between `start` and `stop`."""

    def __init__(
        self,
        idle_s: float,
        timeout_s: float,
        progresses: Callable[[], bool],
        give_up: Callable[[], None],
    ) -> None:
        """Watch `progresses`, which returns True if there was progress since the last call.

        `progresses` is called twice per `idle_s`. `give_up` is called after two misses in a row, or after
        `timeout_s`. One miss does not suffice, because a suspended server has no chance to see progress.
        """
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._progresses = progresses
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at = 0.0
        self._misses = 0

    @property
    def is_on(self) -> bool:
        """True between `start` and `stop`."""
        return self._timer is not None

    def start(self) -> None:
        """Start the watch, unless it is running."""
        if self._timer is None:
            self._ends_at = self._loop.time() + self._timeout_s
            self._misses = 0
            self._progresses()
            self._watch()

    def stop(self) -> None:
        """Stop the watch; `start` may start it again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Stop for good, and drop the references to the connection, which would form a cycle."""
        self.stop()
        self._progresses, self._give_up = _no_progress, _do_nothing

    def _watch(self) -> None:
        remaining_s = self._ends_at - self._loop.time()
        self._timer = self._loop.call_later(min(self._idle_s / 2, remaining_s), self._check)

    def _check(self) -> None:
        self._timer = None
        self._misses = 0 if self._progresses() else self._misses + 1
        if self._misses < 2 and self._loop.time() < self._ends_at:
            self._watch()
        else:
            self._give_up()


def _no_progress() -> bool:
    return False


def _do_nothing() -> None:
    pass


class _ReadWatchdog:
    """Aborts a connection whose client does not read while its write buffer is full."""

    def __init__(self, transport: asyncio.Transport, incoming: Incoming, name: str) -> None:
        self._transport = transport
        self._name = name
        self._unread = 0
        self._watchdog = _Watchdog(incoming.idle_s, _UNLIMITED_S, self._reads, self._abort)
        self.pause, self.resume = self._watchdog.start, self._watchdog.stop
        self.close = self._watchdog.close

    def _reads(self) -> bool:
        # The write buffer alone does not suffice: on a slow connection, the kernel rarely takes more of it.
        before, self._unread = self._unread, _on_its_way(self._transport)
        return self._unread < before

    def _abort(self) -> None:
        logger.warning(
            "%s is disconnected: it has not read anything for NDIF_INCOMING_IDLE_S, and %d bytes wait",
            self._name,
            self._transport.get_write_buffer_size(),
        )
        self._transport.abort()


class _WatchedConnection(asyncio.Protocol):
    """A connection that detects if its client stops reading or sending."""

    _reader: _ReadWatchdog
    _has_received = False

    def pause_writing(self) -> None:
        self._reader.pause()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume()
        super().resume_writing()

    def _receives(self) -> bool:
        received, self._has_received = self._has_received, False
        return received


class HttpConnection(_WatchedConnection, HttpToolsProtocol):
    """An HTTP connection with limits on the size and the time of a request's head.

    An idle connection is closed. If a request is answered before its end, its rest must arrive in time.
    """

    def __init__(
        self, *arguments: Any, incoming: Incoming, limit: ConnectionLimit, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._incoming = incoming
        self._limit = limit
        self._chunks = Allowance(_CHUNKS_PER_S, _CHUNK_BURST, self.loop.time)
        self._reads_again: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_head = False
        self._header_bytes = 0
        self._refusal = _NOT_HTTP
        self._head = _Watchdog(
            incoming.idle_s, incoming.idle_s, _no_progress, self.timeout_keep_alive_handler
        )
        # Watches the rest of a request that was answered before its end.
        self._rest = _Watchdog(
            incoming.idle_s, incoming.timeout_s, self._receives, self.timeout_keep_alive_handler
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reader = _ReadWatchdog(transport, self._incoming, f"a client at {_host(self.client)}")
        self._peer = Peer(self.client, self.server)
        if self._limit.admit(transport, _host(self.client)):
            self._head.start()
        else:
            transport.write(written(_TOO_MANY))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.close(self.transport)
        if self._reads_again is not None:
            self._reads_again.cancel()
        self._head.close()
        self._rest.close()
        self._reader.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        self._head_bytes += len(data)
        with naming(RequestId()):
            super().data_received(data)
            if self._head_bytes > _MAX_HEAD and not self.transport.is_closing():
                self._refusal = _LARGE_HEAD
                self.send_400_response("")
        if self._is_idle() and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        if self.cycle is not None and self.cycle.more_body:
            self._pause(self._chunks.spend(1, len(data)))

    def _pause(self, seconds: float) -> None:
        """Read nothing for some time, so that the kernel gathers what a client sends in small pieces."""
        if seconds and self._reads_again is None and not self.transport.is_closing():
            self.transport.pause_reading()
            self._reads_again = self.loop.call_later(seconds, self._read_again)

    def _read_again(self) -> None:
        self._reads_again = None
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Send the refusal in `self._refusal`, unless an answer has begun, and close the connection."""
        logger.warning("a client at %s is refused: %s", _host(self.client), self._refusal.detail)
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete or not cycle.response_started
        if is_free and not self._rest.is_on:  # else the rest of an answered request is refused
            self.transport.write(written(self._refusal))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[PEER] = self._peer  # type: ignore[literal-required]
        self._is_head = True
        self._header_bytes = 0
        self._head.start()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _MAX_TARGET:
            self._refuse(_LONG_TARGET)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header within the limits; refuse trailers named in `_OF_HEAD`, ignore others."""
        if self._is_head:
            super().on_header(name, value)
            self._header_bytes += len(name) + len(value)
            if len(self.headers) > _MAX_HEADERS:
                self._refuse(_MANY_HEADERS)
            if self._header_bytes > _MAX_HEAD:
                self._refuse(_LARGE_HEAD)
        elif name.lower().startswith(_OF_HEAD):
            self._refuse(_LATE_HEADER)

    def _refuse(self, answer: HttpError) -> None:
        self._refusal = answer
        raise ValueError(answer.detail)  # stops the parser; uvicorn then calls `send_400_response`

    def on_headers_complete(self) -> None:
        self._refuse_ambiguous()
        self._limit.set_busy(self.transport)
        self._head.stop()
        self._is_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def _refuse_ambiguous(self) -> None:
        """Refuse a head that a proxy may read differently, and that llhttp accepts."""
        names = [name for name, _ in self.headers]
        if names.count(b"host") > 1:
            self._refuse(_AMBIGUOUS_HOST)
        if b"transfer-encoding" in names:
            codings = [value for name, value in self.headers if name == b"transfer-encoding"]
            is_plain = len(codings) == 1 and codings[0].strip().lower() == b"chunked"
            if not is_plain or self.parser.get_http_version() != "1.1":
                self._refuse(_AMBIGUOUS_LENGTH)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._rest.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._unset_keepalive_if_required()
            self._rest.start()
        if self._is_idle():
            self._limit.set_idle(self.transport)

    def handle_websocket_upgrade(self) -> None:
        self._limit.set_busy(self.transport)
        self._head.stop()
        super().handle_websocket_upgrade()

    def _is_idle(self) -> bool:
        """Return True if every request was answered, and no further one has begun."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        begins = self._head.is_on or self._rest.is_on or self.transport.get_protocol() is not self
        return is_answered and not begins


class WebSocketConnection(_WatchedConnection, WebSocketsSansIOProtocol):
    """A WebSocket with limits on the size and the time of a client's message.

    Large messages are accepted only while the application allows them. Unfinished messages count in the
    budget of `Incoming`.
    """

    def __init__(
        self, *arguments: Any, incoming: Incoming, limit: ConnectionLimit, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._incoming = incoming
        self._limit = limit
        self._frames = Allowance(_FRAMES_PER_S, _FRAME_BURST, self.loop.time)
        self._slice = _SLICE
        self._is_refused = False
        self._unfinished = incoming.message("")
        self._message = _Watchdog(
            incoming.idle_s,
            incoming.timeout_s,
            self._receives,
            partial(self._fail, _POLICY, "the message did not arrive in time"),
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._limit.is_suspect(_host(self.client)):
            self._slice = _SUSPECT_SLICE
            self._frames = Allowance(_FRAMES_PER_S, _SUSPECT_BURST, self.loop.time)
        self._reader = _ReadWatchdog(
            self.transport, self._incoming, f"a client at {_host(self.client)}"
        )
        self.transport.get_extra_info("socket").setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.close(self.transport)
        self._message.close()
        self._reader.close()
        self._unfinished.hold(0, 0)
        self.frames = []
        for key in (_DISCONNECT, _ON_ITS_WAY):
            if self.app_state.pop(key, None) is not None:
                self.scope["state"].pop(key, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        if not self.handshake_initiated or len(data) <= self._slice:
            super().data_received(data)
        else:
            # The kernel hands over up to 256 KiB: 40,000 frames, which would take seconds. The buffer holds
            # the begun part of a large frame, whose rest needs no small slices.
            start = 0
            while start < len(data) and not (self._is_refused or self.transport.is_closing()):
                end = start + min(max(self._slice, len(self.conn.reader.buffer)), _LARGE_SLICE)
                super().data_received(data[start:end])
                start = end
        if not self.handshake_initiated and not self.transport.is_closing():
            # uvicorn received the whole head at once, and found no handshake in it.
            self._refuse(_NO_HANDSHAKE)
        if self._is_refused or self.transport.is_closing():
            return
        size = len(self.conn.reader.buffer)
        size += sum(len(frame) + _FRAGMENT_BYTES for frame in self.frames)
        if not size and not self._unfinished.size:
            return
        if size > MAX_ENVELOPE and not self._takes_large():
            self._fail(_TOO_BIG, "the message is too large")
            return
        if not self._unfinished.size:
            # By now uvicorn has set the client's address from a trusted proxy's header.
            self._unfinished = self._incoming.message(_host(self.scope["client"]))
            self._message.start()
        try:
            self._unfinished.hold(size, size)
        except IncomingFullError as error:
            self._fail(_TRY_AGAIN, f"the server receives as much as it can: {error}")
        if not size:
            self._message.stop()

    def handle_events(self) -> None:
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        if frames and self._frames.spend(len(frames), sum(len(frame.data) for frame in frames)):
            self._is_refused = True
            self._limit.suspect(_host(self.client))
            self._fail(_POLICY, f"it sends more than {_FRAMES_PER_S:.0f} small frames a second")
        else:
            super().handle_events()

    def handle_connect(self, event: Request) -> None:
        # uvicorn makes no scope for an invalid request.
        self.scope = {"type": "websocket", "client": self.client, "state": {}}  # type: ignore[typeddict-item]
        functions = {_DISCONNECT: self._abort, _ON_ITS_WAY: partial(_on_its_way, self.transport)}
        self.app_state = {**self.app_state, **functions}
        response = self.conn.accept(event)
        if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            super().handle_connect(event)
            return
        self.handshake_initiated = True
        headers = {
            name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers
        }
        problem = response.body.decode().partition("\n")[0]
        with naming(RequestId(event.headers.get_all(HEADER))):
            self._refuse(HttpError(response.status_code, problem, headers))

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        # A refused handshake is complete, too. Otherwise uvicorn logs a missing answer.
        self.handshake_complete = self.handshake_complete or self.close_sent

    def send_500_response(self) -> None:
        if not self.initial_response and not self.handshake_complete:
            with naming(self.scope["state"].get(REQUEST_ID) or RequestId()):
                self._refuse(_FAILED)

    def _refuse(self, answer: HttpError) -> None:
        """Answer a request whose WebSocket is not opened, and close the connection."""
        self.handshake_complete = self.close_sent = True
        self.transport.write(written(answer))
        self.transport.close()

    def send_receive_event_to_app(self) -> None:
        # Only binary messages may be large: they are not parsed here.
        if self.curr_msg_data_type == "text" and sum(map(len, self.frames)) > MAX_ENVELOPE:
            self._fail(_TOO_BIG, "the message is too large")
            return
        super().send_receive_event_to_app()

    def _takes_large(self) -> bool:
        takes: Callable[[], bool] | None = self.scope["state"].get(TAKES_LARGE)
        return takes is not None and takes()

    def _fail(self, code: int, reason: str) -> None:
        self.conn.fail(code, reason)
        if self.handshake_complete:
            self._log(reason)
            self.handle_parser_exception()
        else:
            self._abort(reason)
        self.frames = []
        self.conn.reader.discard()
        self._message.stop()
        self._unfinished.hold(0, 0)

    def _abort(self, reason: str) -> None:
        self._log(reason)
        self.transport.abort()

    def _log(self, reason: str) -> None:
        # The event loop may be the caller, outside the request's logging context.
        request_id = self.scope["state"].get(REQUEST_ID)
        logger.warning(
            "a client at %s is disconnected: %s",
            _host(self.scope["client"]),
            reason,
            extra={} if request_id is None else {"request_id": request_id.text},
        )


def _host(client: tuple[str, int | None] | None) -> str:
    return client[0] if client else ""


def _on_its_way(transport: asyncio.Transport) -> int:
    """Return the number of bytes written to a connection that its other end has not confirmed."""
    size = transport.get_write_buffer_size()
    with contextlib.suppress(OSError, ValueError):  # it is closed
        connection = transport.get_extra_info("socket").fileno()
        size += struct.unpack("i", ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return size
