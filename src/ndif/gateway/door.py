"""The door: the routes of a server that is for many, whatever lies behind it."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.types import Lifespan

from ndif.config import Settings
from ndif.gateway.admin import Admin, Operations
from ndif.gateway.app import gateway
from ndif.gateway.catalogue import Catalogue
from ndif.gateway.health import Health
from ndif.gateway.hub import Hub
from ndif.gateway.responses import Responses
from ndif.gateway.results import Results
from ndif.gateway.socket_io import SocketIo
from ndif.gateway.submit import Submit
from ndif.gateway.subscribe import Subscribe
from ndif.host.runtimes import Runtimes
from ndif.queue.responder import Responder
from ndif.stores.accounts import Accounts
from ndif.stores.broker import Broker
from ndif.stores.objects import FileStore, ObjectStore

_GRACE_S = 3
"""Seconds that open connections have to end when the server does."""


@dataclass(frozen=True, slots=True)
class Door:
    """What clients come in by."""

    app: Starlette
    subscribe: Subscribe
    socket_io: SocketIo

    async def farewell(self) -> None:
        """Tell live clients that their channels are closed now."""
        await asyncio.gather(self.subscribe.farewell(), self.socket_io.farewell())


def door(
    settings: Settings,
    broker: Broker,
    objects: ObjectStore,
    responder: Responder,
    catalogue: Catalogue,
    runtimes: Runtimes,
    accounts: Accounts,
    hub: Hub,
    lifespan: Lifespan[Starlette],
    *,
    loopback: bool,
    operations: Operations | None,
    token: str | None,
) -> Door:
    """The whole of it; an operator's routes where there are `operations` and a `token` for them."""
    submit = Submit(settings, broker, responder, runtimes, catalogue, accounts)
    subscribe, socket_io = Subscribe(broker), SocketIo(broker, settings)
    routes = [
        *submit.routes(),
        *subscribe.routes(),
        *Responses(objects).routes(),
        # From another store clients fetch their results themselves.
        *(Results(objects).routes() if isinstance(objects, FileStore) else ()),
        *Health(catalogue, accounts).routes(),
        *(Admin(operations, token, settings).routes() if operations and token else ()),
    ]
    app = gateway(routes, socket_io, hub, lifespan, loopback=loopback)
    return Door(app, subscribe, socket_io)


def http(app: Starlette, settings: Settings, listening: socket.socket) -> uvicorn.Config:
    """How an application is served on `listening`."""
    host, port = listening.getsockname()[:2]
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        # Its errors go where ours do.
        log_config=None,
        log_level="warning",
        access_log=False,
        # Results are compressed already, and by their client's choice.
        ws_per_message_deflate=False,
        # What a hybrid job's client computed comes in one message.
        ws_max_size=settings.socketio_max_http_buffer_size,
        timeout_graceful_shutdown=_GRACE_S,
    )
