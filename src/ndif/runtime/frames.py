"""The frames between a host and its model process: a message and raw bytes.

A frame has the header's length (4 bytes), the body's length (8 bytes, both big-endian), the header and the
body. The header is the message as a JSON object with a `kind`; the body is opaque. File descriptors may
accompany the first byte. If the host has the body in a file, the frame carries the file's descriptor in
place of the body, and the header's `in_file` is the file's size.
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
"""Largest body, in bytes, that is appended to its header: one more send would cost more than the copy."""
MAX_TEXT = 1 << 20
"""Largest printed line or error in one frame, in bytes."""


class _Header(msgspec.Struct):
    kind: str
    in_file: int | None = None


_HEADER = msgspec.json.Decoder(_Header)


def pack(message: Message, body_size: int = 0, in_file: int | None = None) -> bytes:
    """Return the part of a frame before its body; `in_file` is the size of a body in a file."""
    header = header_of(message)
    if in_file is not None:
        header["in_file"] = in_file
    text = to_json(header)
    return LENGTHS.pack(len(text), body_size) + text


def unpack(text: bytes) -> tuple[Message, int | None]:
    """Return the message of a header, and the size of a body in a file; raise ValueError if invalid."""
    header = read(_HEADER, text)
    return message_of(header.kind, text), header.in_file


M = TypeVar("M")


class FrameChannel:
    """The model process's blocking end of a socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(
        self, message: Message, body: bytes | memoryview = b"", fds: Sequence[int] = ()
    ) -> None:
        """Write one complete frame."""
        head = pack(message, len(body))
        if len(body) <= SMALL:
            head, body = head + body, b""
        if fds:
            head = head[socket.send_fds(self.socket, [head], fds) :]
        self.socket.sendall(head)
        if body:
            self.socket.sendall(body)

    def receive(self) -> tuple[Message, bytes | bytearray, Sequence[int]]:
        """Read one frame; return its message, body and descriptors."""
        first, fds, _, _ = socket.recv_fds(self.socket, LENGTHS.size, 4)
        lengths = first + self._exactly(LENGTHS.size - len(first))
        header_size, body_size = LENGTHS.unpack(lengths)
        message, size = unpack(bytes(self._exactly(header_size)))
        if size is not None:
            return message, _read_file(fds[0], size), ()
        return message, self._exactly(body_size), fds

    def expect(self, kind: type[M]) -> tuple[M, bytes | bytearray, Sequence[int]]:
        """Read one frame; raise ValueError unless its message is of this kind."""
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
    """Return the content of a file of exactly `size` bytes, and close its descriptor."""
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        content = file.read()
    if len(content) != size:
        raise EOFError("the host's file of a body was cut off")
    return content
