"""What the control plane takes of a request: gateway, queue and host, before a model that does nothing."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import uvloop

from bench.figures import Figure
from bench.processes import ROOT

_USERS = 32
_ROUNDS = 5
_ROUND_S = 4.0
_RATE = 300
_RATE_S = 20.0
_KEY = (
    'nnsight.modeling.transformers.TransformersModel:{"repo_id": "bench/nothing", "revision": null}'
)
_PAYLOAD = b"\0" * 2048
_BOUNDARY = "a-boundary"
_TEXT, _BINARY, _PING, _PONG = 1, 2, 9, 10
"""Kinds of WebSocket frames (RFC 6455, section 5.2)."""
_NO_MASK = bytes(4)


class User:
    """One client: a WebSocket on which it hears, and a connection on which it asks."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def connect(self) -> None:
        """Open both."""
        self._heard, self._channel = await asyncio.open_connection("127.0.0.1", self._port)
        key = base64.b64encode(os.urandom(16)).decode()
        self._channel.write(
            (
                f"GET /subscribe HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nUpgrade: websocket\r\n"
                f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
            ).encode()
        )
        await self._heard.readuntil(b"\r\n\r\n")
        _, first = await self._frame()
        self._request = self._made(json.loads(first)["session_id"])
        self._answers, self._asks = await asyncio.open_connection("127.0.0.1", self._port)

    def _made(self, session: str) -> bytes:
        """A request as nnsight 0.8 sends it."""
        data = json.dumps({"model_key": _KEY, "session_id": session, "compress": False, "env": {}})
        parts = b"".join(
            b"--%s\r\nContent-Disposition: form-data; name=%s\r\n\r\n%s\r\n"
            % (_BOUNDARY.encode(), name, content)
            for name, content in (
                (b'"data"', data.encode()),
                (b'"blob"; filename="blob"', _PAYLOAD),
            )
        )
        body = parts + b"--%s--\r\n" % _BOUNDARY.encode()
        head = (
            f"POST /request HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nnnsight-version: 0.8.1\r\n"
            f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _frame(self) -> tuple[int, bytes]:
        first, second = await self._heard.readexactly(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", await self._heard.readexactly(2))
        return first & 0xF, await self._heard.readexactly(length)

    async def run(self) -> None:
        """One request, until its result is here."""
        self._asks.write(self._request)
        answered = asyncio.ensure_future(self._answer())
        while True:
            kind, content = await self._frame()
            if kind == _BINARY:
                break
            if kind == _PING:
                self._channel.write(bytes((0x80 | _PONG, 0x80 | len(content), *_NO_MASK)) + content)
                continue
            if kind != _TEXT or b'"ERROR"' in content:
                raise RuntimeError(content.decode(errors="replace"))
        await answered

    async def _answer(self) -> None:
        head = await self._answers.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        await self._answers.readexactly(length)


async def sustained(users: list[User]) -> float:
    """Requests a second when each user sends the next once the last is done."""
    ends = time.perf_counter() + _ROUND_S
    done = 0

    async def go_on(user: User) -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await user.run()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*map(go_on, users))
    return done / (time.perf_counter() - began)


async def at_rate(users: list[User]) -> list[float]:
    """Seconds that each request took, when they come at random times at a fixed rate."""
    dice = random.Random(0)
    idle: asyncio.Queue[User] = asyncio.Queue()
    for user in users:
        idle.put_nowait(user)
    took: list[float] = []

    async def one(due: float) -> None:
        user = await idle.get()
        await user.run()
        took.append(time.perf_counter() - due)
        idle.put_nowait(user)

    due = began = time.perf_counter()
    running = []
    while due - began < _RATE_S:
        due += dice.expovariate(_RATE)
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        running.append(asyncio.create_task(one(due)))
    await asyncio.gather(*running)
    return sorted(took)


@contextlib.asynccontextmanager
async def _users() -> AsyncIterator[list[User]]:
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.control_server", folder),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            port = int(await process.stdout.readline())
            users = [User(port) for _ in range(_USERS)]
            for user in users:
                await user.connect()
            yield users
        finally:
            process.terminate()
            await process.wait()


async def _measure() -> tuple[list[float], list[float]]:
    async with _users() as users:
        await sustained(users)
        rates = [await sustained(users) for _ in range(_ROUNDS)]
        return rates, await at_rate(users)


def control() -> list[Figure]:
    """Throughput, and the latency at a rate."""
    rates, took = uvloop.run(_measure())
    p50, p99 = (took[int(len(took) * part)] * 1e3 for part in (0.5, 0.99))
    return [
        Figure(
            "control plane: sustained",
            statistics.median(rates),
            800,
            "requests/s",
            at_most=False,
            how=f"{_USERS} users, a no-op model process; {min(rates):.0f} to {max(rates):.0f} in "
            f"{_ROUNDS} rounds, with its clients on the same machine",
        ),
        Figure(
            f"control plane: p99 at {_RATE} requests/s",
            p99,
            50,
            "ms",
            how=f"{len(took):,} requests at random times, p50 {p50:.1f} ms",
        ),
    ]


if __name__ == "__main__":
    print(control())
