"""The door: the routes of a server that is for many, whatever lies behind it."""

from __future__ import annotations

import socket

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
) -> Starlette:
    """The application; an operator's routes where there are `operations` and a `token` for them."""
    submit = Submit(settings, broker, responder, runtimes, catalogue, accounts)
    routes = [
        *submit.routes(),
        *Subscribe(broker).routes(),
        *Responses(objects).routes(),
        # From another store clients fetch their results themselves.
        *(Results(objects).routes() if isinstance(objects, FileStore) else ()),
        *Health(catalogue, accounts).routes(),
        *(Admin(operations, token, settings).routes() if operations and token else ()),
    ]
    return gateway(routes, SocketIo(broker, settings), hub, lifespan, loopback=loopback)


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
