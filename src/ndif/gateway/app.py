"""The gateway: every route of a server in one ASGI application."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount
from starlette.types import Lifespan

from ndif.config.settings import Settings
from ndif.control.operations import Perform
from ndif.gateway.admin import AdminRoutes
from ndif.gateway.callbacks import CallbackRoute
from ndif.gateway.catalogue import Catalogue
from ndif.gateway.connections import limited
from ndif.gateway.envelope_wire import WebSocketSubscriptions
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.health import HealthRoutes
from ndif.gateway.hf_mirror import HfMirror
from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.incoming import Incoming
from ndif.gateway.jobs import JobRoutes
from ndif.gateway.origin import SameOrigin
from ndif.gateway.results import ResponseRoute, ResultRoute, UpdateOf
from ndif.gateway.submit import SubmitRoute
from ndif.host.runtimes import Runtimes
from ndif.queue.callbacks.guard import Network
from ndif.stores.accounts import Accounts
from ndif.stores.broker import Broker
from ndif.stores.objects import FileStore, ObjectStore
from ndif.stores.responder import Responder

_SHUTDOWN_S = 3
"""Seconds that open connections have to end when the server does."""
_STOPPED = (
    "The server was stopped before this job was done. Send it again: another of its hosts answers, or "
    "this one once it is back."
)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application and the subscriptions of its connected clients."""

    app: Starlette
    websockets: WebSocketSubscriptions
    socket_io: SocketIoSubscriptions
    incoming: Incoming

    async def announce_shutdown(self) -> None:
        """Send every subscribed client an ERROR that says that the server stops."""
        await asyncio.gather(self.websockets.fail_all(_STOPPED), self.socket_io.fail_all(_STOPPED))


def create_gateway(
    settings: Settings,
    broker: Broker,
    objects: ObjectStore,
    responder: Responder,
    catalogue: Catalogue,
    runtimes: Runtimes,
    accounts: Accounts,
    hub: HfMirror,
    lifespan: Lifespan[Starlette],
    *,
    host: str,
    perform: Perform,
    update_of: UpdateOf,
    token: str | None,
    callback_networks: Sequence[Network],
    callback_secrets: Sequence[str],
) -> Gateway:
    """Return the gateway over these stores and models.

    `host` is the name or address that the server listens on.
    `perform` performs operations, and `update_of` asks the queue. Without an operator's `token` there are
    no `/admin` routes. Call-backs reach public addresses and `callback_networks`, and the first of
    `callback_secrets` is what their receivers are told of.
    """
    websockets = WebSocketSubscriptions(broker, accounts, settings)
    socket_io = SocketIoSubscriptions(broker, settings)
    incoming = Incoming(settings)
    callbacks = CallbackRoute(accounts, callback_networks, settings.sends_mail, callback_secrets)
    submit = SubmitRoute(
        settings, broker, responder, runtimes, catalogue, accounts, incoming, callbacks
    )
    routes = [
        *submit.routes(),
        *callbacks.routes(),
        *websockets.routes(),
        *JobRoutes(accounts, perform).routes(),
        *ResponseRoute(objects, update_of, accounts).routes(),
        # From any other store clients download their results directly.
        *(ResultRoute(objects).routes() if isinstance(objects, FileStore) else ()),
        *HealthRoutes(catalogue, accounts, runtimes).routes(),
        *(AdminRoutes(perform, token, settings, accounts.registry).routes() if token else ()),
    ]
    app = create_app(routes, socket_io, hub, lifespan, settings, host=host)
    return Gateway(app, websockets, socket_io, incoming)


def create_app(
    routes: Iterable[BaseRoute],
    socket_io: SocketIoSubscriptions,
    hub: HfMirror,
    lifespan: Lifespan[Starlette],
    settings: Settings,
    *,
    host: str,
) -> Starlette:
    """Return the application that listens on `host`: `routes`, the Hugging Face mirror and Socket.IO."""
    return Starlette(
        routes=[
            *routes,
            Mount("/hub", routes=hub.routes()),
            Mount("/ws", app=socket_io.app),
        ],
        middleware=[Middleware(SameOrigin, settings=settings, host=host)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )


def uvicorn_config(
    gateway: Gateway, settings: Settings, listening: socket.socket
) -> uvicorn.Config:
    """Return the configuration that serves a gateway on the socket `listening`."""
    host, port = listening.getsockname()[:2]
    return uvicorn.Config(
        gateway.app,
        **limited(gateway.incoming),
        host=host,
        port=port,
        # uvicorn's errors go where the server's own go.
        log_config=None,
        log_level="warning",
        access_log=False,
        forwarded_allow_ips=settings.proxies,
        # Results are compressed already where their client asked for it.
        ws_per_message_deflate=False,
        # A hybrid job's client uploads its results in one message.
        ws_max_size=settings.socketio_max_http_buffer_size,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
