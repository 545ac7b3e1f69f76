"""Updates to one client over Socket.IO, each sent once the client has handled the one before.

An update is two messages: a packet that announces bytes, and the bytes. python-socketio's client, which
nnsight 0.6 and 0.7 use, handles every message in a thread of its own, so that two that come at once may
change places. The client then takes the next packet for the bytes of this one, or drops bytes for which it
has no packet.
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
"""The event that clients of this wire wait for."""
_ID = 1
"""The number under which a client acknowledges a packet, of which it has one at a time."""
_ANNOUNCEMENT: str = packet.Packet(packet.EVENT, [_EVENT, b""], "/", _ID).encode()[0]
_PATIENCE_S = 2.0
"""Time for the acknowledgement of an update, beside the time for its bytes."""
_SLOWEST = 1 << 20
"""Bytes a second that a client, or a proxy's, is expected to receive at least."""
_MOST_WAITING = 64 << 10
"""Bytes that may wait for an acknowledgement, beside one update that is larger."""
_FAREWELL_S = 1.0


class Acknowledgements(socketio.AsyncManager):  # type: ignore[misc] # it has no types
    """Say whose update was acknowledged: each client has one at a time to acknowledge."""

    def __init__(self, acknowledge: Callable[[str], None]) -> None:
        super().__init__()
        self._acknowledge = acknowledge

    async def trigger_callback(self, sid: str, id: int, data: Any) -> None:  # noqa: A002
        """Replace the look-up of a callback by the client's number."""
        self._acknowledge(sid)


class SocketIoChannel:
    """Send one client its updates in order.

    Each update's packet is sent as soon as the client has acknowledged the update before, which is usually
    long before its bytes follow. Bytes that came too early nevertheless are sent again.
    """

    def __init__(self, server: Any, sid: str, on_its_way: Callable[[], int] = lambda: 0) -> None:
        """Take a client, and what returns the bytes that have not reached its machine yet."""
        self._server = server
        self._sid = sid
        self._on_its_way = on_its_way
        self._waiting: deque[bytes] = deque()
        self._came, self._acknowledged, self._sent, self._taken = (
            asyncio.Event() for _ in range(4)
        )
        self._sent.set()

    def put(self, frame: bytes) -> None:
        """Add an update, joined with those that wait as far as they may be."""
        self._sent.clear()
        while self._waiting:
            joined = join_header_frames(self._waiting[-1], frame)
            if joined is None:
                break
            self._waiting.pop()
            frame = joined
        self._waiting.append(frame)
        self._came.set()

    async def until_takes_more(self) -> None:
        """Return once few updates wait here."""
        while sum(map(len, self._waiting)) > _MOST_WAITING:
            self._taken.clear()
            await self._taken.wait()

    def acknowledge(self) -> None:
        """Note that the client has handled the last update."""
        self._acknowledged.set()

    async def sent(self) -> None:
        """Return once the client has acknowledged every update, or after a second."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._sent.wait(), _FAREWELL_S)

    async def run(self) -> None:
        """Send updates for ever."""
        await self._came.wait()
        await self._announce()
        while True:
            while self._waiting:
                frame = self._waiting.popleft()
                self._taken.set()
                await self._send(frame)
            self._sent.set()
            self._came.clear()
            await self._came.wait()

    async def _send(self, frame: bytes) -> None:
        """Send an update's bytes until the client acknowledges them, and announce the next update."""
        await self._message(frame)
        patience, is_repeated, comes = _PATIENCE_S + len(frame) / _SLOWEST, False, False
        while not await self._is_acknowledged(patience):
            came_just_now, comes = comes, self._on_its_way() > 0
            if comes or came_just_now:  # over a slow connection
                continue
            await self._message(frame)
            patience, is_repeated = patience * 2, True
        if is_repeated:
            # The client may yet handle both, and must not take one for the bytes of the next update.
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
        if connection is not None:  # else its client has left
            await self._server.eio.send(connection, content)
            with contextlib.suppress(KeyError):
                # A client that does not read has no more to acknowledge.
                await self._server.eio.sockets[connection].queue.join()
