"""The live channels of a gateway: a stop, and clients that handle messages in any order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import engineio
import pytest
import socketio
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.asyncio.client import connect

from ndif.config.settings import Settings
from ndif.gateway import socket_io_channel
from ndif.gateway.caller import subscription_of
from ndif.gateway.envelope_wire import WebSocketSubscriptions
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.open_channels import OpenChannels
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response
from ndif.schema.status import Status
from ndif.schema.wires import torch_bytes
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.objects import FileStore
from ndif.tasks import end, within
from tests import frames
from tests.on_loop import on_loop
from tests.services.redis import RedisServer
from tests.stores.broker.signers import SIGNER
from tests.waiting import PATIENCE_S, time_passes

pytestmark = pytest.mark.engine

ME = f"uid {os.geteuid()}"
"""The name of a caller of this machine."""


def a_request(subscription_id: str, wire: Wire) -> Request:
    model = ModelKey("a.B", "org/name")
    return Request(model, "", wire, b"", False, "", subscription_id=subscription_id)


@contextlib.asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """Serve an application and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            await end([serving])


@on_loop
async def test_stopping_gateway_notifies_clients_and_names_ended_jobs() -> None:
    broker = MemoryBroker()
    websockets, socket_io = (
        WebSocketSubscriptions(
            broker, OpenAccounts(hotswapping=False), OpenChannels(Settings()), Settings()
        ),
        SocketIoSubscriptions(broker, OpenChannels(Settings()), Settings()),
    )
    routes = [*websockets.routes(), Mount("/ws", app=socket_io.app)]
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(served(Starlette(routes=routes)))
        newer = await stack.enter_async_context(connect(f"ws://{address}/subscribe"))
        older = await stack.enter_async_context(socketio.AsyncSimpleClient())
        await older.connect(
            f"http://{address}", socketio_path="/ws/socket.io", transports=["websocket"]
        )
        session = json.loads(await newer.recv())["session_id"]
        requests = [a_request(subscription_of(session, ME), Wire.ENVELOPE) for _ in range(2)]
        requests += [a_request(subscription_of(older.sid, ME), Wire.HEADERS)]
        for request in requests:
            await broker.submit(request)
        await websockets.fail_all("It stops.")
        await socket_io.fail_all("It stops.")
        responses = [frames.read(await newer.recv()) for _ in range(2)]
        responses.append(frames.read((await older.receive())[1]))
        assert {response.id for response in responses[:2]} == {
            response.id for response in requests[:2]
        }
        assert responses[2].id == requests[2].id
        assert {(response.status, response.description) for response in responses} == {
            (Status.ERROR, "It stops.")
        }


class Disordered(engineio.Client):  # type: ignore[misc] # it has no types
    """A client on a busy machine, where the thread of each message may be delayed."""

    _random = random.Random(19)

    def start_background_task(self, target: Any, *arguments: Any, **named: Any) -> threading.Thread:
        """See `engineio.Client`. Each message has a thread."""

        def late() -> None:
            time_passes(self._random.choice((0, 0.01, 0.02)))
            with contextlib.suppress(ValueError):  # a thread without its message ends this way
                target(*arguments, **named)

        if target != self.handlers.get("message"):
            return super().start_background_task(target, *arguments, **named)
        return super().start_background_task(late)


class Busy(socketio.Client):  # type: ignore[misc]
    """The client of python-socketio on such a machine."""

    def _engineio_client_class(self) -> type:
        return Disordered


def received(address: str, connected: Callable[[str], object]) -> list[Response]:
    """Return the updates that a client of nnsight 0.7 receives until its job ends."""
    responses: list[Response] = []
    client = socketio.SimpleClient()
    client.client_class = Busy
    with client:
        client.connect(f"http://{address}", socketio_path="/ws/socket.io", transports=["websocket"])
        connected(client.sid)
        while not responses or not responses[-1].status.terminal:
            responses.append(frames.read(client.receive(timeout=PATIENCE_S)[1]))
    return responses


@on_loop
async def test_updates_reach_client_that_handles_messages_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket_io_channel, "_PATIENCE_S", 0.1)
    broker, lines = MemoryBroker(), [f"line {index}" for index in range(40)]
    socket_io = SocketIoSubscriptions(broker, OpenChannels(Settings()), Settings())
    loop = asyncio.get_running_loop()
    connected: asyncio.Queue[str] = asyncio.Queue()

    def note(sid: str) -> None:
        loop.call_soon_threadsafe(connected.put_nowait, sid)

    async with served(Starlette(routes=[Mount("/ws", app=socket_io.app)])) as address:
        client = asyncio.create_task(asyncio.to_thread(received, address, note))
        request = a_request(subscription_of(await connected.get(), ME), Wire.HEADERS)
        await broker.submit(request)
        result = InlineResult(torch_bytes({"hidden": 1}), compressed=False)
        for update in (
            *(
                Response(request.id, status)
                for status in (Status.QUEUED, Status.DISPATCHED, Status.RUNNING)
            ),
            *(Response(request.id, Status.LOG, line) for line in lines),
            Response(request.id, Status.STREAM, data=b"a function"),
            *(Response(request.id, Status.LOG, line) for line in lines),
            Response(request.id, Status.COMPLETED, "Done.", result),
        ):
            await broker.publish(request, update)
            await asyncio.sleep(0.002)
        updates = await client
    logged = [update.description for update in updates if update.status is Status.LOG]
    assert "\n".join(logged).split("\n") == lines * 2
    statuses = [update.status for update in updates if update.status is not Status.LOG]
    assert statuses[-2:] == [Status.STREAM, Status.COMPLETED]
    assert statuses == [*dict.fromkeys(statuses)]
    assert updates[-1].data == {"hidden": 1}


@on_loop
async def test_client_without_ping_answers_is_removed(redis: RedisServer, tmp_path: Path) -> None:
    """The task that sends an update detects the dead connection and ends itself."""
    broker = RedisBroker(redis.url, FileStore(tmp_path, 60), SIGNER, inline_bytes=1000)
    await broker.start()
    socket_io = SocketIoSubscriptions(broker, OpenChannels(Settings()), Settings())
    routes = [Mount("/ws", app=socket_io.app)]
    async with served(Starlette(routes=routes)) as address, socketio.AsyncSimpleClient() as client:
        await client.connect(
            f"http://{address}", socketio_path="/ws/socket.io", transports=["websocket"]
        )
        (opened,) = socket_io._open.values()
        (connection,) = socket_io._server.eio.sockets.values()
        connection.last_ping = time.time() - 3600
        request = a_request(opened.subscription.id, Wire.HEADERS)
        await broker.publish(request, Response(request.id, Status.QUEUED))
        await within(asyncio.wait(opened.tasks), PATIENCE_S)
        assert await broker.disconnected([opened.subscription.id])
    await broker.stop()
