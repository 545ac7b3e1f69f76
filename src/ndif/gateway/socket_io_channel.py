"""Updates to one client over Socket.IO, each sent after the client has acknowledged the previous one.

An update is two messages: a packet that announces bytes, and the bytes. python-socketio's client, which
nnsight 0.6 and 0.7 use, handles every message in a thread of its own, so two messages that arrive together
may be handled in the wrong order. The client then mistakes the next packet for the bytes, or drops bytes
that have no packet yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import socketio
from socketio import packet

from ndif.schema.wires import join_header_frames
from ndif.tasks import within

_EVENT = "blocking_response"
"""Name of the event that clients of this wire wait for."""
_ACK_ID = 1
"""Socket.IO's acknowledgement id; one suffices, since a client has one unacknowledged packet at a time."""
_ANNOUNCEMENT: str = packet.Packet(packet.EVENT, [_EVENT, b""], "/", _ACK_ID).encode()[0]
_PATIENCE_S = 2.0
"""Seconds to wait for an acknowledgement, in addition to the transfer time of the bytes."""
_MIN_RATE = 1 << 20
"""Minimum rate, in bytes per second, at which a client or a proxy is expected to receive."""
_MAX_WAITING_BYTES = 64 << 10
"""Bytes that may wait here; one larger update may wait, too."""
_FAREWELL_S = 1.0


class Acknowledgements(socketio.AsyncManager):  # type: ignore[misc] # it has no types
    """Reports each acknowledgement by its client's `sid`; a client has one open packet at a time."""

    def __init__(self, acknowledge: Callable[[str], None]) -> None:
        super().__init__()
        self._acknowledge = acknowledge

    async def trigger_callback(self, sid: str, id: int, data: Any) -> None:  # noqa: A002
        """Report the client; the base class would look up a callback by `id`."""
        self._acknowledge(sid)


class SocketIoChannel:
    """Sends one client its updates in order.

    Each announcing packet is sent once the previous update is acknowledged, usually long before its bytes.
    A client may drop bytes that overtake their packet, so unacknowledged bytes are sent again.
    """

    def __init__(self, server: Any, sid: str, on_its_way: Callable[[], int] = lambda: 0) -> None:
        """Serve the client `sid`; `on_its_way` returns the number of unconfirmed bytes."""
        self._server = server
        self._sid = sid
        self._on_its_way = on_its_way
        self._waiting: deque[bytes] = deque()
        self._arrived, self._acknowledged, self._sent, self._taken = (
            asyncio.Event() for _ in range(4)
        )
        self._sent.set()

    def put(self, frame: bytes) -> None:
        """Queue an update, merged with the waiting ones where `join_header_frames` permits."""
        self._sent.clear()
        while self._waiting:
            joined = join_header_frames(self._waiting[-1], frame)
            if joined is None:
                break
            self._waiting.pop()
            frame = joined
        self._waiting.append(frame)
        self._arrived.set()

    async def until_takes_more(self) -> None:
        """Return once at most 64 KiB of updates wait here."""
        while sum(map(len, self._waiting)) > _MAX_WAITING_BYTES:
            self._taken.clear()
            await self._taken.wait()

    def acknowledge(self) -> None:
        """Record that the client has handled the last update."""
        self._acknowledged.set()

    async def sent(self) -> None:
        """Return once the client has acknowledged every update, or after a second."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._sent.wait(), _FAREWELL_S)

    async def run(self) -> None:
        """Send updates until cancelled."""
        await self._arrived.wait()
        await self._announce()
        while True:
            while self._waiting:
                frame = self._waiting.popleft()
                self._taken.set()
                await self._send(frame)
            self._sent.set()
            self._arrived.clear()
            await self._arrived.wait()

    async def _send(self, frame: bytes) -> None:
        """Send an update's bytes, repeatedly until the client acknowledges them, then announce the next."""
        await self._message(frame)
        patience, is_repeated, is_moving = _PATIENCE_S + len(frame) / _MIN_RATE, False, False
        while not await self._is_acknowledged(patience):
            was_moving, is_moving = is_moving, self._on_its_way() > 0
            if is_moving or was_moving:  # a slow connection: the bytes may not have arrived yet
                continue
            await self._message(frame)
            patience, is_repeated = patience * 2, True
        if is_repeated:
            # The client may still handle a repeated copy, and must not take it for the next update's bytes.
            await asyncio.sleep(_PATIENCE_S)
        await self._announce()

    async def _is_acknowledged(self, patience: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._acknowledged.wait(), patience)
        return self._acknowledged.is_set()

    async def _announce(self) -> None:
        self._acknowledged.clear()
        await self._message(_ANNOUNCEMENT)

    async def _message(self, content: str | bytes) -> None:
        connection = self._server.manager.eio_sid_from_sid(self._sid, "/")
        if connection is not None:  # None: the client has left
            await self._server.eio.send(connection, content)
            with contextlib.suppress(KeyError):
                # Back-pressure: no more piles up for a client that does not read.
                await self._server.eio.sockets[connection].queue.join()
