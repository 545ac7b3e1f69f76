"""The frames between a host and its model process: a message and raw bytes.

On the socket: the header's length (4 bytes) and the body's (8 bytes), both big-endian; the header, which
is the message as a JSON object with a `kind`; the body, opaque. A file descriptor may ride with a frame's
first byte. A body that the host has in a file is not on the socket: its descriptor rides, and `in_file` is
its size.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ndif.runtime.messages import Message, header_of, message_of
from ndif.runtime.typed_json import read, to_json

LENGTHS = struct.Struct("!IQ")
SMALL = 1 << 16
"""Largest body, in bytes, that is cheaper to copy behind its header than to send separately."""
MAX_TEXT = 1 << 20
"""Largest printed line or error, in bytes, in one frame."""


class _Header(msgspec.Struct):
    kind: str
    in_file: int | None = None


_HEADER = msgspec.json.Decoder(_Header)


def pack(message: Message, body_size: int = 0, in_file: int | None = None) -> bytes:
    """Return a frame up to its body, of which `in_file` bytes are in a file."""
    header = header_of(message)
    if in_file is not None:
        header["in_file"] = in_file
    text = to_json(header)
    return LENGTHS.pack(len(text), body_size) + text


def unpack(text: bytes) -> tuple[Message, int | None]:
    """Return the message of a header, and the size of a body in a file; raise ValueError without one."""
    header = read(_HEADER, text)
    return message_of(header.kind, text), header.in_file


M = TypeVar("M")


class Channel:
    """The blocking end of a socket pair, inside the model process."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(
        self, message: Message, body: bytes | memoryview = b"", fds: Sequence[int] = ()
    ) -> None:
        """Write one frame whole."""
        head = pack(message, len(body))
        if len(body) <= SMALL:
            head, body = head + body, b""
        if fds:
            head = head[socket.send_fds(self.socket, [head], fds) :]
        self.socket.sendall(head)
        if body:
            self.socket.sendall(body)

    def receive(self) -> tuple[Message, bytes | bytearray, Sequence[int]]:
        """Read one frame: message, body, and the descriptors that came with it."""
        first, fds, _, _ = socket.recv_fds(self.socket, LENGTHS.size, 4)
        lengths = first + self._exactly(LENGTHS.size - len(first))
        header_size, body_size = LENGTHS.unpack(lengths)
        message, size = unpack(bytes(self._exactly(header_size)))
        if size is not None:
            return message, _read_file(fds[0], size), ()
        return message, self._exactly(body_size), fds

    def expect(self, kind: type[M]) -> tuple[M, bytes | bytearray, Sequence[int]]:
        """Read one frame; raise ValueError unless it has a message of this kind."""
        message, body, fds = self.receive()
        if not isinstance(message, kind):
            raise ValueError(f"the host sent {message} in place of a {kind.__name__}")
        return message, body, fds

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self.socket.recv_into(view)
            if count == 0:
                raise EOFError("the host closed the channel")
            view = view[count:]
        return data


def _read_file(descriptor: int, size: int) -> bytes:
    """Return a file's content, and close its descriptor."""
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        content = file.read()
    if len(content) != size:
        raise EOFError("the host's file of a body was cut off")
    return content
