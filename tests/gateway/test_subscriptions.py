"""The live channels of a gateway that stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket

import socketio
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.asyncio.client import connect

from ndif.config.settings import Settings
from ndif.gateway.caller import subscription_of
from ndif.gateway.envelope_wire import WebSocketSubscriptions
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.status import Status
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker
from ndif.tasks import end
from tests import frames
from tests.on_loop import on_loop


def a_request(subscription_id: str, wire: Wire) -> Request:
    model = ModelKey("a.B", "org/name")
    return Request(model, "", wire, b"", False, "", subscription_id=subscription_id)


@on_loop
async def test_a_gateway_that_stops_names_the_jobs_that_it_ends() -> None:
    broker = MemoryBroker()
    websockets, socket_io = (
        WebSocketSubscriptions(broker, OpenAccounts(hotswapping=False), Settings()),
        SocketIoSubscriptions(broker, Settings()),
    )
    app = Starlette(routes=[*websockets.routes(), Mount("/ws", app=socket_io.app)])
    async with contextlib.AsyncExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        stack.push_async_callback(end, [serving])
        newer = await stack.enter_async_context(connect(f"ws://{address}/subscribe"))
        older = await stack.enter_async_context(socketio.AsyncSimpleClient())
        await older.connect(
            f"http://{address}", socketio_path="/ws/socket.io", transports=["websocket"]
        )
        session = json.loads(await newer.recv())["session_id"]
        me = f"uid {os.geteuid()}"
        requests = [a_request(subscription_of(session, me), Wire.ENVELOPE) for _ in range(2)]
        requests += [a_request(subscription_of(older.sid, me), Wire.HEADERS)]
        for request in requests:
            await broker.submit(request)
        await websockets.fail_all("It stops.")
        await socket_io.fail_all("It stops.")
        told = [frames.read(await newer.recv()) for _ in range(2)]
        told.append(frames.read((await older.receive())[1]))
        assert {each.id for each in told[:2]} == {each.id for each in requests[:2]}
        assert told[2].id == requests[2].id
        assert {(each.status, each.description) for each in told} == {(Status.ERROR, "It stops.")}
