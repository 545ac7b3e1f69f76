"""A user's web server on loopback, with configured answers; it records its requests."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class Asked:
    """One request that a receiver got."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """A server that answers with `status` and further `headers`; 0 gives no answer.

    -1 speaks no HTTP, and -2 never ends its headers.
    """

    port: int = 0
    scheme: str = "http"
    status: int = 204
    first: list[int] = field(default_factory=list)
    """Statuses of the first answers, instead of `status`."""
    headers: str = ""
    asked: list[Asked] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that answers wait for."""

    def __post_init__(self) -> None:
        self.release.set()

    @property
    def url(self) -> str:
        """Return the address of the receiver."""
        return f"{self.scheme}://localhost:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request and answer it."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._exchange(reader, writer)
        self.at_once -= 1
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.asked.append(Asked(method, target, headers, body))
        await self.release.wait()
        status = self.first.pop(0) if self.first else self.status
        if status == 0:
            await reader.read()
            return
        if status == -2:
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"X-More: of this\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)
        answer = f"HTTP/1.1 {status} Said\r\n{self.headers}Content-Length: 9\r\n\r\nsecretive"
        writer.write(b"220 smtp.example.org\r\n\r\n" if status < 0 else answer.encode())
        await writer.drain()


@contextlib.asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """A receiver that listens while the context is open."""
    receiver = Receiver(scheme="https" if tls else "http")
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        receiver.release.set()
        server.close()
