"""The host's end of a socket pair: frames in and out without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence

from ndif.runtime.frames import LENGTHS, SMALL, pack, unpack
from ndif.runtime.messages import Message
from ndif.schema.payload import Payload, PayloadFile

_MAX_HEADER = 1 << 16
_CHUNK = 1 << 12
"""Bytes that are read at a time while a frame is small."""


class ProtocolError(Exception):
    """The other end broke the frame format or a limit, and is no longer trusted."""


class AsyncFrameChannel:
    """Frames over a non-blocking socket. One reader and one writer at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._sending = asyncio.Lock()
        self._read = bytearray()
        """Bytes that were received and not consumed yet."""

    @classmethod
    def pair(cls) -> tuple[AsyncFrameChannel, socket.socket]:
        """Return a channel, and the socket for the other process."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    async def send(self, message: Message, body: Payload = b"", fds: Sequence[int] = ()) -> None:
        """Write one frame whole; raise an `OSError` when the other end is closed.

        A body in a file is sent as a descriptor, which the other end reads. If the file cannot be opened,
        the channel hangs up, so that the other end does not wait for it.
        """
        loop = asyncio.get_running_loop()
        async with self._sending:
            if isinstance(body, PayloadFile):
                await self._send_file(message, body)
                return
            head = pack(message, len(body))
            if len(body) <= SMALL:
                head, body = head + body, b""
            if fds:
                head = head[await self._send_fds(head, fds) :]
            await loop.sock_sendall(self._socket, head)
            if body:
                await loop.sock_sendall(self._socket, body)

    async def _send_file(self, message: Message, body: PayloadFile) -> None:
        try:
            descriptor = body.open()
        except OSError:
            self.hang_up()
            raise
        try:
            head = pack(message, in_file=len(body))
            head = head[await self._send_fds(head, [descriptor]) :]
            await asyncio.get_running_loop().sock_sendall(self._socket, head)
        finally:
            os.close(descriptor)

    async def _send_fds(self, head: bytes, fds: Sequence[int]) -> int:
        while True:
            try:
                return socket.send_fds(self._socket, [head], list(fds))
            except BlockingIOError:
                await until_ready(self._socket.fileno(), to_write=True)

    async def receive(self, max_body_bytes: Callable[[Message], int]) -> tuple[Message, bytes]:
        """Read one frame; `max_body_bytes` returns the largest body that its message allows.

        Raise `EOFError` when the other end is closed, and a `ProtocolError` when a length or the message is
        invalid.
        """
        header_size, body_size = LENGTHS.unpack(await self._exactly(LENGTHS.size))
        if header_size > _MAX_HEADER:
            raise ProtocolError(f"a header of {header_size} bytes is over the limit")
        try:
            message, _ = unpack(bytes(await self._exactly(header_size)))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(str(error)) from error
        if body_size > max_body_bytes(message):
            raise ProtocolError(f"a frame of {body_size} bytes is over the limit of its kind")
        return message, bytes(await self._exactly(body_size)) if body_size else b""

    def hang_up(self) -> None:
        """Make both ends read an end of file."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; the other reads an end of file."""
        self._socket.close()

    async def _exactly(self, size: int) -> bytearray:
        """Return exactly `size` bytes; some may have arrived with an earlier frame."""
        while len(self._read) < size <= _CHUNK:
            chunk = bytearray(_CHUNK)
            del chunk[await self._receive_into(chunk) :]
            self._read += chunk
        data, self._read = self._read[:size], self._read[size:]
        received = len(data)
        if received < size:
            data += bytes(size - received)
            view = memoryview(data)
            while received < size:
                received += await self._receive_into(view[received:])
        return data

    async def _receive_into(self, buffer: bytearray | memoryview) -> int:
        """Receive into `buffer`; return the byte count, or raise `EOFError` if the channel is closed."""
        try:
            # Always through the loop: a peer that writes without end must not starve the others.
            count = await asyncio.get_running_loop().sock_recv_into(self._socket, buffer)
        except (OSError, ValueError) as error:
            # uvloop raises ValueError for a socket that this side has closed.
            raise EOFError(str(error)) from error
        if count == 0:
            raise EOFError("the other end closed the channel")
        return count


async def until_ready(descriptor: int, *, to_write: bool = False) -> None:
    """Return once a descriptor can be read, or written to."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    if to_write:
        add_watch, remove_watch = loop.add_writer, loop.remove_writer
    else:
        add_watch, remove_watch = loop.add_reader, loop.remove_reader
    add_watch(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        remove_watch(descriptor)
