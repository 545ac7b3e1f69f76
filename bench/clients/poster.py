"""A client that posts to a route over one connection, with as little CPU as `bench.clients.user.User`."""

from __future__ import annotations

import asyncio

from bench.clients.user import post

_CHUNKED = b"transfer-encoding: chunked"


class Poster:
    """One client, which sends the same bytes as a client of nnsight 0.8."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def connect(self) -> None:
        """Open the connection."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def run(self, payload: bytes) -> None:
        """Post a request, and read the answer.

        Raises:
            RuntimeError: If the answer's status is not 200.
        """
        self._writer.write(post(self._port, "", payload))
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        lines = head.lower().split(b"\r\n")
        if _CHUNKED in lines:
            while length := int(await self._reader.readuntil(b"\r\n"), 16):
                await self._reader.readexactly(length + 2)
            await self._reader.readexactly(2)
        else:
            length = next(int(e.split(b":")[1]) for e in lines if e.startswith(b"content-length:"))
            await self._reader.readexactly(length)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()
