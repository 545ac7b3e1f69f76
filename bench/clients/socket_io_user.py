"""A client of nnsight 0.6 or 0.7, over Socket.IO, with as little CPU as `bench.clients.user.User`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
from urllib.parse import urlsplit

from bench.clients.user import User, answered

_TEXT, _BINARY, _NO_MASK = 1, 2, bytes(4)
_PING, _PONG, _CONNECT = b"2", b"3", b"40"
_EVENT = re.compile(rb"45\d+-(?P<number>\d*)\[")
"""An event with bytes (Socket.IO 5); it has a number if the server waits for an acknowledgement."""
_URL = re.compile(rb"https?://")


class SocketIoUser(User):
    """One client: a Socket.IO connection for responses, and a connection for each request."""

    def __init__(self, port: int, key: str, nnsight: str, api_key: str = "") -> None:
        """Set the client up for the model of `key`, with `api_key` and this version of nnsight."""
        super().__init__(port, key, api_key)
        self._headers = (
            f"nnsight-model-key: {key}\r\nnnsight-compress: False\r\nnnsight-version: {nnsight}\r\n"
            f"python-version: {sys.version.split()[0]}\r\nndif-api-key: {api_key}\r\n"
            f"ndif-callback: \r\nContent-Type: application/octet-stream\r\n"
        )

    async def connect(self) -> None:
        """Open the connection for responses."""
        self._responses, self._channel = await asyncio.open_connection("127.0.0.1", self._port)
        key = base64.b64encode(os.urandom(16)).decode()
        self._channel.write(
            (
                "GET /ws/socket.io/?transport=websocket&EIO=4 HTTP/1.1\r\n"
                f"Host: 127.0.0.1:{self._port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
            ).encode()
        )
        await self._responses.readuntil(b"\r\n\r\n")
        await self._frame()
        self._say(_CONNECT)
        _, joined = await self._frame()
        self._session = json.loads(joined.removeprefix(_CONNECT))["sid"]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    async def send(self, payload: bytes = b"", *, polled: bool = False) -> None:
        """Send one request and wait until it is accepted; for a polled request, do not call `result`."""
        session = "" if polled else f"ndif-session_id: {self._session}\r\n"
        head = (
            f"POST /request HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n{self._headers}{session}"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        await _send(self._port, head.encode() + payload)

    async def result(self) -> None:
        """Wait for the result, and fetch it if it is stored.

        Raises:
            RuntimeError: If the job fails.
        """
        number = b""
        while True:
            kind, content = await self._frame()
            if kind == _BINARY:
                if number:
                    self._say(b"43" + number + b"[]")
                if b"COMPLETED" in content:
                    break
                if b"ERROR" in content:
                    raise RuntimeError(content.decode(errors="replace"))
            elif content == _PING:
                self._say(_PONG)
            elif event := _EVENT.match(content):
                number = event["number"]
            elif not self._answer_ping(kind, content) and kind != _TEXT:
                raise RuntimeError(content.decode(errors="replace"))
        if url := _URL.search(content):
            # In a pickle, a text follows its length.
            length = int.from_bytes(content[url.start() - 4 : url.start()], "little")
            await _fetch(content[url.start() : url.start() + length].decode())

    def _say(self, text: bytes) -> None:
        self._channel.write(bytes((0x80 | _TEXT, 0x80 | len(text), *_NO_MASK)) + text)


async def _fetch(url: str) -> None:
    at = urlsplit(url)
    head = f"GET {at.path}?{at.query} HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n\r\n"
    await _send(at.port or 80, head.encode())


async def _send(port: int, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await answered(reader)
    writer.close()
