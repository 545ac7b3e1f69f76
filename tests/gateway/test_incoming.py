"""Memory budget and timeouts of incoming requests, and of updates that clients do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import socketio
import uvicorn
import websocket
import zstandard
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from ndif.cluster.models import Models
from ndif.config.settings import Settings
from ndif.control.operations import Operation
from ndif.gateway import socket_io_channel
from ndif.gateway.callbacks import CallbackRoute
from ndif.gateway.caller import subscription_of
from ndif.gateway.connection_limit import ConnectionLimit
from ndif.gateway.connections import limited
from ndif.gateway.envelope_wire import WebSocketSubscriptions
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.incoming import Incoming, IncomingCount, IncomingFullError
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.quota import Quota
from ndif.gateway.submit import SubmitRoute
from ndif.host.runtimes import Runtimes
from ndif.queue.callbacks.guard import CallbackRules
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey
from ndif.schema.payload import PayloadFile
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.broker.spool import Spool
from ndif.stores.callbacks import SqliteCallbacks
from ndif.stores.objects import FileStore
from ndif.stores.rate_limiter import Rates
from ndif.stores.responder import Responder
from ndif.stores.stores import Stores
from ndif.tasks import end, within
from tests.gateway.catalogue import KnownCatalogue
from tests.on_loop import on_loop
from tests.security.hostile_clients import frame, part
from tests.waiting import PATIENCE_S, eventually, time_passes_async

MIB = 1 << 20
ME = f"uid {os.geteuid()}"
"""The name of a caller of this machine."""
MODEL = f"nnsight.modeling.transformers.TransformersModel:{json.dumps({'repo_id': 'org/name'})}"


async def _nothing_ran(_: Operation) -> Any:
    return {"usage": []}


class Gateway:
    """The routes that receive data from clients, on a real server."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        objects = FileStore(folder, 60)
        self.folder = folder
        self.broker = MemoryBroker(spool=Spool(folder / "spool", objects))
        self.incoming = Incoming(settings)
        accounts = OpenAccounts(hotswapping=False, trusted=True)
        queue = SqliteCallbacks(folder / uuid.uuid4().hex)
        submit = SubmitRoute(
            settings,
            Stores(self.broker, objects, queue, accounts, Responder(self.broker, objects)),
            KnownCatalogue(Models([DeploymentConfig("org/name", "org/name", dedicated=True)])),
            Runtimes(folder / "runtimes"),
            self.incoming,
            Quota(settings, _nothing_ran, Rates("")),
            CallbackRoute(settings, CallbackRules((), ()), accounts, queue),
            OpenChannels(settings),
        )
        self.app = Starlette(
            routes=[
                *submit.routes(),
                *WebSocketSubscriptions(
                    self.broker, accounts, OpenChannels(settings), settings
                ).routes(),
                Mount(
                    "/ws",
                    app=SocketIoSubscriptions(self.broker, OpenChannels(settings), settings).app,
                ),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )
        self.address = ("127.0.0.1", 0)
        self.serving: Any = None
        self.kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        """The connection of a client that does not read."""

    @property
    def held(self) -> int:
        """The bytes that count as unfinished."""
        return self.incoming._all._held

    def files(self) -> list[str]:
        """Return the names of payloads on the disk."""
        return [p.name for p in (self.folder / "spool").iterdir() if "sqlite" not in p.name]

    async def post(self, size: int, *, as_: str = "", ends: bool = True) -> Any:
        """Send a request with a payload of zeros; return the connection if it does not end."""
        body = part("data", json.dumps({"model_key": MODEL}).encode()) + part("blob", bytes(size))
        stop = b"--hostile--\r\n"
        head = (
            "POST /request HTTP/1.1\r\nHost: 127.0.0.1\r\nnnsight-version: 0.8.1\r\n"
            f"X-Forwarded-For: {as_ or '127.0.0.1'}\r\nContent-Length: {len(body + stop)}\r\n"
            "Content-Type: multipart/form-data; boundary=hostile\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(*self.address)
        with contextlib.suppress(ConnectionError):
            writer.write(head.encode() + body + (stop if ends else b""))
            await writer.drain()
        return await answer(reader, writer) if ends else (reader, writer)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, str]:
    """Return an answer's status and sentence, and close the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    body = await reader.read(MIB)
    writer.close()
    return int(head.split()[1]), f"{head}{body.decode()}"


@contextlib.asynccontextmanager
async def gateway(
    folder: Path,
    *,
    ping_s: float = 20,
    keep_alive_s: float = PATIENCE_S,
    connections: int = 1000,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """Run a gateway with these settings, this ping interval and at most so many connections."""
    server = Gateway(folder, Settings().model_copy(update=settings))
    async with contextlib.AsyncExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.address = listening.getsockname()[:2]
        options = {"ws_ping_interval": ping_s, "ws_ping_timeout": ping_s}
        limit = ConnectionLimit(connections, lambda _: False)
        config = uvicorn.Config(
            server.app,
            lifespan="off",
            log_level="warning",
            forwarded_allow_ips="127.0.0.1",
            timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
            **{**options, **limited(server.incoming, limit)},
        )
        server.serving = uvicorn.Server(config)
        serving = asyncio.create_task(server.serving.serve(sockets=[listening]))
        stack.push_async_callback(end, [serving])
        stack.push_async_callback(server.broker.stop)
        yield server


def is_gone(server: Gateway, session: str) -> bool:
    return session not in server.broker._subscriptions


def unfinished(limit: int, *addresses: str) -> list[IncomingCount]:
    incoming = Incoming(Settings().model_copy(update={"max_incoming_bytes": limit}))
    return [incoming.message(address) for address in addresses]


def test_address_may_use_half_of_budget() -> None:
    mine, also_mine, yours, theirs = unfinished(100, "a", "a", "b", "c")
    mine.hold(30, 0)
    also_mine.hold(20, 0)
    with pytest.raises(IncomingFullError) as caught:
        mine.hold(31, 0)
    assert caught.value.of_address
    yours.hold(50, 0)
    with pytest.raises(IncomingFullError) as caught:
        theirs.hold(1, 0)
    assert not caught.value.of_address
    mine.hold(0, 0)
    theirs.hold(30, 0)


def test_single_request_may_exceed_budget() -> None:
    mine, yours = unfinished(100, "a", "b")
    mine.hold(1000, 1000)
    with pytest.raises(IncomingFullError):
        yours.hold(1, 0)
    mine.hold(0, 0)
    yours.hold(1, 1)


@on_loop
async def test_addresses_behind_proxy_are_counted_separately(tmp_path: Path) -> None:
    async with gateway(tmp_path, max_incoming_bytes=8 * MIB) as server:
        kept = [await server.post(3 * MIB, as_="10.0.0.1", ends=False)]
        await eventually(lambda: server.held >= 3 * MIB)
        status, text = await server.post(3 * MIB, as_="10.0.0.1")
        assert status == 429
        assert "from your address" in text
        assert "retry-after: 5" in text.lower()
        assert (await server.post(3 * MIB, as_="10.0.0.2"))[0] == 200
        kept.append(await server.post(3 * MIB, as_="10.0.0.2", ends=False))
        await eventually(lambda: server.held >= 6 * MIB)
        status, text = await server.post(3 * MIB, as_="10.0.0.3")
        assert status == 503
        assert "NDIF_MAX_INCOMING_BYTES" in text
        for _, writer in kept:
            writer.close()
        await eventually(lambda: not server.held)
        assert len(server.files()) == 1  # of the request that was accepted


@on_loop
async def test_stalled_body_times_out(tmp_path: Path) -> None:
    async with gateway(tmp_path, incoming_idle_s=0.3) as server:
        status, text = await answer(*await server.post(2 * MIB, ends=False))
        assert status == 408
        assert "came too slowly" in text
        assert not server.held
        assert not server.files()


@on_loop
async def test_endless_body_times_out(tmp_path: Path) -> None:
    limits = {"incoming_idle_s": 2 * PATIENCE_S, "incoming_timeout_s": 0.5}
    async with gateway(tmp_path, **limits) as server:
        status, _ = await answer(*await server.post(10, ends=False))
        assert status == 408


@on_loop
async def test_connection_with_endless_head_is_closed(tmp_path: Path) -> None:
    async with gateway(tmp_path, incoming_idle_s=0.3) as server:
        for content in (b"", b"GET / HTTP/1.1\r\nHost:"):
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(content)
            assert await reader.read() == b""
            writer.close()
    async with gateway(tmp_path) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000)
        assert b" 431 " in await reader.readline()
        writer.close()


@pytest.mark.parametrize("rest", [b"a" * 490, b"a" * 5, b"a" * 490 + b"\r\n"])
@on_loop
async def test_connection_answered_before_end_of_request_is_closed_in_time(
    rest: bytes, tmp_path: Path
) -> None:
    async with gateway(tmp_path, keep_alive_s=0.3, incoming_idle_s=0.3) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(
            b"POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n" + b"a" * 10
        )
        assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
        await time_passes_async(0.2)
        writer.write(rest)
        with contextlib.suppress(ConnectionError):  # it was closed before the rest came
            await reader.read()
        writer.close()


@on_loop
async def test_connection_stays_usable_after_early_answer(tmp_path: Path) -> None:
    idle_s = 0.5
    async with gateway(tmp_path, incoming_idle_s=idle_s) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        for _ in range(2):
            writer.write(b"POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n")
            assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
            for _ in range(25):
                writer.write(b"a" * 2)
                await asyncio.sleep(0.03)  # in total longer than the idle timeout
        writer.write(
            b"GET /subscribe HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        await reader.readuntil(b"session_id")
        await time_passes_async(1.5 * idle_s)
        assert server.broker._subscriptions
        writer.close()


@on_loop
async def test_only_small_payload_stays_in_memory(tmp_path: Path) -> None:
    async with gateway(tmp_path) as server:
        for size, kind in ((MIB, bytearray), (MIB + 1, PayloadFile), (5 * MIB, PayloadFile)):
            await server.broker.subscribe(subscription_of("mine", ME))
            content = zstandard.compress(b"small") + bytes(size)
            async with httpx.AsyncClient() as http:
                sent = await http.post(
                    f"http://127.0.0.1:{server.address[1]}/request",
                    data={"data": json.dumps({"model_key": MODEL, "session_id": "mine"})},
                    files={"blob": content[:size]},
                    headers={"nnsight-version": "0.8.1"},
                )
            assert sent.status_code == 200, sent.text
            claimed = await server.broker.claim()
            payload = await server.broker.payload(claimed)
            assert isinstance(payload, kind)
            whole = payload.read() if isinstance(payload, PayloadFile) else payload
            assert whole == content[:size]
            await server.broker.release(claimed)
            assert not server.files()


@on_loop
async def test_stalled_message_closes_its_websocket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(tmp_path, incoming_idle_s=0.3) as server:
        async with connect(f"ws://127.0.0.1:{server.address[1]}/subscribe") as channel:
            await channel.recv()
            await time_passes_async(0.5)  # a channel may be idle between messages
            await channel.send("whole")
            channel.transport.write(frame(b"begun", opcode=1, final=False))
            with pytest.raises(ConnectionClosed) as caught:
                await channel.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008
        assert not server.held
    assert "did not arrive in time" in caplog.text


def a_request(subscription_id: str, wire: Wire) -> Request:
    model = ModelKey("a.B", "org/name")
    return Request(model, "", wire, b"", False, "", subscription_id=subscription_id)


@on_loop
async def test_large_message_needs_submitted_job(tmp_path: Path) -> None:
    content = bytes(3 * MIB)
    async with gateway(tmp_path) as server:
        for has_job in (False, True):
            async with socketio.AsyncSimpleClient() as client:
                await client.connect(
                    f"http://127.0.0.1:{server.address[1]}",
                    socketio_path="/ws/socket.io",
                    transports=["websocket"],
                )
                session = subscription_of(client.sid, ME)
                request = a_request(session, Wire.HEADERS)
                if has_job:
                    await server.broker.submit(request)
                    await client.emit("stream_upload", (content, request.id))
                    assert await server.broker.uploaded(request) == content
                else:
                    await client.emit("stream_upload", (content, request.id))
                    await eventually(partial(is_gone, server, session))


def open_channel(server: Gateway) -> tuple[websocket.WebSocket, str]:
    """Open a live channel as nnsight 0.8 does, which answers a ping only while it waits for an update."""
    channel = websocket.create_connection(
        f"ws://127.0.0.1:{server.address[1]}/subscribe", timeout=PATIENCE_S
    )
    return channel, json.loads(channel.recv())["session_id"]


@on_loop
async def test_live_channel_survives_unanswered_pings(tmp_path: Path) -> None:
    async with gateway(tmp_path, ping_s=0.1) as server:
        channel, session = await asyncio.to_thread(open_channel, server)
        await time_passes_async(0.5)  # several ping intervals of 0.1 s
        (subscription_id,) = server.broker._subscriptions
        assert subscription_id == subscription_of(session, f"uid {os.geteuid()}")
        request = a_request(subscription_id, Wire.ENVELOPE)
        await server.broker.submit(request)
        await server.broker.publish(request, Response(request.id, Status.COMPLETED, "Done."))
        assert b"Done." in (await asyncio.to_thread(channel.recv)).encode()
        # The kernel detects a client whose machine is gone.
        (connection,) = server.serving.server_state.connections
        kernel = connection.transport.get_extra_info("socket")
        assert kernel.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000
        await asyncio.to_thread(channel.close)


def slow_socket(address: tuple[str, int]) -> socket.socket:
    """Return a connection with a small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    return client


async def open_and_stop_reading(server: Gateway, wire: Wire) -> str:
    """Open a live channel by hand; return the subscription's id."""
    client = await asyncio.to_thread(slow_socket, server.address)
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    path = "/subscribe" if wire is Wire.ENVELOPE else "/ws/socket.io/?EIO=4&transport=websocket"
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    if wire is Wire.HEADERS:
        writer.write(frame(b"40", opcode=1))
    await eventually(lambda: server.broker._subscriptions)
    server.kept = reader, writer
    (session,) = server.broker._subscriptions
    return session


async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read, and acknowledge as clients of Socket.IO do."""
    while await reader.read(MIB):
        writer.write(frame(b"431[]", opcode=1))


@on_loop
async def test_update_over_slow_connection_is_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_io_channel, "_PATIENCE_S", 0.2)
    size = 200_000
    async with gateway(tmp_path) as server:
        session = await open_and_stop_reading(server, Wire.HEADERS)
        assert server.kept is not None
        reader, writer = server.kept
        request = a_request(session, Wire.HEADERS)
        await server.broker.submit(request)
        await server.broker.publish(request, Response(request.id, Status.LOG, "l" * size))
        received = 0
        while received < size:
            content = await reader.read(4096)
            assert content
            received += len(content)
            await asyncio.sleep(0.02)
        writer.write(frame(b"431[]", opcode=1))
        with contextlib.suppress(asyncio.TimeoutError):
            while content := await within(reader.read(MIB), 0.5):
                received += len(content)
        assert received < 2 * size
        writer.close()


@pytest.mark.parametrize("wire", Wire)
@on_loop
async def test_client_over_unread_limit_is_disconnected(
    wire: Wire, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(tmp_path, max_unread_bytes=4 * MIB) as server:
        session = await open_and_stop_reading(server, wire)
        request = a_request(session, wire)
        await server.broker.submit(request)
        subscription = server.broker._subscriptions[session]
        for _ in range(50):
            queued = Response(request.id, Status.QUEUED, "q" * MIB)
            if not await server.broker.publish(request, queued):
                break
            assert subscription.frames._bytes <= 6 * MIB
            await asyncio.sleep(0)
        await eventually(lambda: not server.broker._subscriptions)
    assert "NDIF_MAX_UNREAD_BYTES" in caplog.text


@pytest.mark.parametrize("wire", Wire)
@on_loop
async def test_job_output_waits_for_slow_client(wire: Wire, tmp_path: Path) -> None:
    line = "l" * MIB
    async with gateway(tmp_path, max_unread_bytes=4 * MIB) as server:
        session = await open_and_stop_reading(server, wire)
        request = a_request(session, wire)
        await server.broker.submit(request)

        async def run() -> None:
            for _ in range(30):
                await server.broker.publish(request, Response(request.id, Status.LOG, line))
            await server.broker.publish(request, Response(request.id, Status.COMPLETED))

        running = asyncio.create_task(run())
        await time_passes_async(0.3)
        assert not running.done()
        assert server.kept is not None
        reading = asyncio.create_task(read_all(*server.kept))
        await running
        server.kept[1].close()
        await end([reading])


@on_loop
async def test_client_that_stops_reading_is_disconnected_in_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(tmp_path, incoming_idle_s=0.3, max_unread_bytes=100 * MIB) as server:
        session = await open_and_stop_reading(server, Wire.ENVELOPE)
        request = a_request(session, Wire.ENVELOPE)
        await server.broker.submit(request)
        for _ in range(8):
            await server.broker.publish(request, Response(request.id, Status.QUEUED, "q" * MIB))
        await eventually(lambda: not server.broker._subscriptions)
    assert "has not read anything" in caplog.text
