"""Limits on a gateway's connections, and on tiny pieces of input that cost the event loop time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from ndif.gateway.connection_limit import (
    Allowance,
    ConnectionLimit,
    default_limit,
)
from ndif.gateway.connections import HttpConnection, WebSocketConnection
from tests.gateway.test_incoming import gateway
from tests.on_loop import on_loop
from tests.security.hostile_clients import frame

MIB = 1 << 20
PING, TEXT = 9, 1
BURST = 50
PER_S = 10.0


class Connection:
    """A transport as far as `ConnectionLimit` uses one."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def opened(limit: ConnectionLimit, address: str, count: int = 1) -> list[Any]:
    connections = [Connection() for _ in range(count)]
    for connection in connections:
        assert limit.admit(connection, address)  # type: ignore[arg-type]
    return connections


def limit_of(count: int, *proxies: str) -> ConnectionLimit:
    return ConnectionLimit(count, proxies.__contains__)


def test_longest_idle_connection_is_closed_for_new_one() -> None:
    limit = limit_of(4)
    first, second = opened(limit, "10.0.0.1", 2)
    third, fourth = opened(limit, "10.0.0.2", 2)
    limit.set_busy(first)
    opened(limit, "10.0.0.3")
    assert [c.is_aborted for c in (first, second, third, fourth)] == [False, True, False, False]


def test_finished_request_makes_connection_idle_again() -> None:
    limit = limit_of(2, "10.0.0.1")
    first, second = opened(limit, "10.0.0.1", 2)
    limit.set_busy(first)
    limit.set_idle(first)
    opened(limit, "10.0.0.1")
    assert (first.is_aborted, second.is_aborted) == (False, True)


def test_new_connection_is_refused_if_none_is_idle() -> None:
    limit = limit_of(2, "10.0.0.1")
    busy = opened(limit, "10.0.0.1", 2)
    for connection in busy:
        limit.set_busy(connection)
    assert not limit.admit(Connection(), "10.0.0.2")  # type: ignore[arg-type]
    limit.close(busy[0])
    limit.close(busy[0])
    opened(limit, "10.0.0.2")


def test_client_with_half_of_connections_displaces_only_its_own() -> None:
    limit = limit_of(8)
    (other,) = opened(limit, "10.0.0.9")
    mine = opened(limit, "10.0.0.1", 4)
    opened(limit, "10.0.0.1")
    assert mine[0].is_aborted
    assert not other.is_aborted
    for connection in mine[1:]:
        limit.set_busy(connection)
    opened(limit, "10.0.0.1")
    assert not other.is_aborted


def test_trusted_proxy_may_use_all_connections() -> None:
    limit = limit_of(8, "10.0.0.1")
    connections = opened(limit, "10.0.0.1", 8)
    assert not any(connection.is_aborted for connection in connections)


def test_default_leaves_quarter_of_descriptors() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert default_limit() == min(soft, 65_536) - min(soft, 65_536) // 4


@pytest.mark.process
def test_soft_limit_of_descriptors_is_raised_to_hard_limit() -> None:
    script = (
        "import resource as r; from ndif.gateway.connection_limit import raise_descriptor_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 512)); raise_descriptor_limit()\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "(512, 512)"


def test_allowance_of_tiny_pieces_is_used_up_and_refilled() -> None:
    now = 100.0
    allowance = Allowance(10, 5, lambda: now)
    assert allowance.spend(5, 5) == 0
    assert allowance.spend(1, 1) == pytest.approx(0.1, abs=0.001)
    now += 0.2
    assert allowance.spend(1, 1) == 0


def test_large_pieces_cost_nothing() -> None:
    allowance = Allowance(10, 5, lambda: 0.0)
    assert allowance.spend(1, 64 * 1024) == 0
    assert all(allowance.spend(1, 4096) == 0 for _ in range(1000))
    assert allowance.spend(4, 0) == 0


def handshake() -> bytes:
    return (
        "GET /subscribe HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {b64encode(os.urandom(16)).decode()}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("opcode", [PING, TEXT])
@on_loop
async def test_websocket_that_sends_tiny_frames_without_pause_is_closed(
    opcode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(tmp_path) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(handshake())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frame(b"x", opcode=opcode) * 20_000)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # the server leaves frames unread
            while piece := await reader.read(MIB):
                answer += piece
        # Pongs to the frames of the first slices, and none to the others.
        assert len(answer) < 20_000
        assert "it sends more than 1000 small frames a second" in caplog.text
        writer.close()


def test_refused_network_is_suspect_for_ten_seconds() -> None:
    now = 100.0
    limit = ConnectionLimit(8, lambda _: False, lambda: now)
    limit.suspect("2001:db8:1:2::1")
    assert limit.is_suspect("2001:db8:1:2::9")
    assert not limit.is_suspect("10.0.0.1")
    now += 10
    assert not limit.is_suspect("2001:db8:1:2::1")


@on_loop
async def test_refused_client_may_send_fewer_frames_when_it_connects_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = 0

    def handle_ping(_: WebSocketConnection) -> None:
        nonlocal pings
        pings += 1

    monkeypatch.setattr(WebSocketConnection, "handle_ping", handle_ping)
    counts = []
    async with gateway(tmp_path) as server:
        for _ in range(2):
            pings = 0
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(handshake())
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(80):
                writer.write(frame(b"x", opcode=PING) * 10)
                await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                await reader.read(MIB)
            counts.append(pings)
            writer.close()
    assert counts[0] > 300
    assert counts[1] < 100


@on_loop
async def test_idle_connections_make_room_for_request(tmp_path: Path) -> None:
    async with gateway(tmp_path, connections=8) as server:
        idle = [await asyncio.open_connection(*server.address) for _ in range(20)]
        status, _ = await server.post(10)
        assert status == 200
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()


@on_loop
async def test_connection_beyond_limit_of_busy_ones_gets_503(tmp_path: Path) -> None:
    async with gateway(tmp_path, connections=4) as server:
        busy = [await server.post(10, ends=False) for _ in range(2)]
        for reader, writer in busy:
            await writer.drain()
            assert not reader.at_eof()
        status, text = await server.post(10)
        assert status == 503
        assert "as many connections as it can" in text
        assert "retry-after: 5" in text.lower()
        for _, writer in busy:
            writer.close()


@on_loop
async def test_body_in_single_bytes_is_read_in_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    receive = HttpConnection.data_received

    def data_received(connection: HttpConnection, data: bytes) -> None:
        reads.append(len(data))
        receive(connection, data)

    monkeypatch.setattr(HttpConnection, "data_received", data_received)
    async with gateway(tmp_path) as server:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        reader, writer = await server.post(0, ends=False)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = b"--hostile--\r\n"
        for byte in bytes(1000):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert len(reads) <= BURST + PER_S * (loop.time() - begun) + 2
        assert sum(reads) > len(body)
        writer.close()
        assert reader is not None
