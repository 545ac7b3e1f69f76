"""A client with little CPU use, so that measurements show the server's cost."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import os
import struct
import time


def key_of(name: str) -> str:
    """Return the key of a model in nnsight 0.8."""
    repository = json.dumps({"repo_id": name, "revision": None})
    return f"nnsight.modeling.transformers.TransformersModel:{repository}"


KEY = key_of("bench/nothing")
SMALL = b"\0" * 2048
_BOUNDARY = "a-boundary"
_TEXT, _BINARY, _PING, _PONG = 1, 2, 9, 10
"""Kinds of WebSocket frames (RFC 6455, section 5.2)."""
_NO_MASK = bytes(4)
_PING_EVERY_S = 0.02
_KEPT_ALIVE_S = 3.0
"""Seconds after which the gateway closes an idle connection."""


@functools.lru_cache(maxsize=64)
def post(port: int, session: str, payload: bytes, key: str = KEY, api_key: str = "") -> bytes:
    """Return the bytes of a request of nnsight 0.8, for the model of this key."""
    data = json.dumps({"model_key": key, "session_id": session, "compress": False, "env": {}})
    parts = b"".join(
        b"--%s\r\nContent-Disposition: form-data; name=%s\r\n\r\n%s\r\n"
        % (_BOUNDARY.encode(), name, content)
        for name, content in (
            (b'"data"', data.encode()),
            (b'"blob"; filename="blob"', payload),
        )
    )
    body = parts + b"--%s--\r\n" % _BOUNDARY.encode()
    head = (
        f"POST /request HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nnnsight-version: 0.8.1\r\n"
        f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\n"
        f"Content-Length: {len(body)}\r\n{_header(api_key)}\r\n"
    )
    return head.encode() + body


def get(port: int, path: str, api_key: str = "") -> bytes:
    """Return the bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{_header(api_key)}\r\n".encode()


def _header(api_key: str) -> str:
    return f"ndif-api-key: {api_key}\r\n" if api_key else ""


async def answered(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next answer.

    Raises:
        RuntimeError: If the answer's status is not 200.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    body = await reader.readexactly(length)
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError((head + body).decode())
    return body


async def pings(port: int, count: int) -> list[float]:
    """Return the seconds of each `/ping` from its due time, even if an earlier one delays it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took = []
    due = time.perf_counter()
    for _ in range(count):
        due += _PING_EVERY_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        writer.write(get(port, "/ping"))
        await answered(reader)
        took.append(time.perf_counter() - due)
    writer.close()
    return took


class User:
    """One client: a WebSocket for responses, and a connection for requests."""

    def __init__(self, port: int, key: str = KEY, api_key: str = "") -> None:
        """Set the client up for the model of `key`, with `api_key`."""
        self._port = port
        self._key = key
        self._api_key = api_key

    async def connect(self) -> None:
        """Open both connections."""
        self._responses, self._channel = await asyncio.open_connection("127.0.0.1", self._port)
        key = base64.b64encode(os.urandom(16)).decode()
        self._channel.write(
            (
                f"GET /subscribe HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nUpgrade: websocket\r\n"
                f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
                f"{_header(self._api_key)}\r\n"
            ).encode()
        )
        await self._responses.readuntil(b"\r\n\r\n")
        _, first = await self._frame()
        self._session = json.loads(first)["session_id"]
        await self._reconnect()

    def close(self) -> None:
        """Close both connections."""
        self._channel.close()
        self._requests.close()

    async def _reconnect(self) -> None:
        self._answers, self._requests = await asyncio.open_connection("127.0.0.1", self._port)
        self._used = time.monotonic()

    async def _frame(self) -> tuple[int, bytes]:
        first, second = await self._responses.readexactly(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", await self._responses.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", await self._responses.readexactly(8))
        return first & 0xF, await self._responses.readexactly(length)

    async def run(self, payload: bytes = SMALL) -> None:
        """Send one request and wait for its result."""
        await self.send(payload)
        await self.result()

    async def send(self, payload: bytes = SMALL, *, polled: bool = False) -> None:
        """Send one request and wait until it is accepted; for a polled request, do not call `result`.

        Raises:
            RuntimeError: If the request is refused.
        """
        if time.monotonic() - self._used > _KEPT_ALIVE_S:
            self._requests.close()
            await self._reconnect()
        self._used = time.monotonic()
        session = "" if polled else self._session
        self._requests.write(post(self._port, session, payload, self._key, self._api_key))
        await answered(self._answers)

    def _answer_ping(self, kind: int, content: bytes) -> bool:
        """Answer a ping frame; return True if the frame was one."""
        if kind == _PING:
            self._channel.write(bytes((0x80 | _PONG, 0x80 | len(content), *_NO_MASK)) + content)
        return kind == _PING

    async def send_many(self, count: int) -> None:
        """Send requests one after the other, without waiting for results."""
        receiving = asyncio.ensure_future(self.receive())
        for _ in range(count):
            await self.send()
        receiving.cancel()

    async def receive(self) -> None:
        """Read frames until cancelled."""
        while True:
            kind, content = await self._frame()
            self._answer_ping(kind, content)

    async def result(self) -> None:
        """Wait for the result."""
        while True:
            kind, content = await self._frame()
            if kind == _BINARY:
                break
            if self._answer_ping(kind, content):
                continue
            if kind != _TEXT or b'"ERROR"' in content:
                raise RuntimeError(content.decode(errors="replace"))
