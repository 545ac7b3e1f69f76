"""The gateway: every route of a server in one ASGI application."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from ndif.config.settings import Settings
from ndif.control.operations import Perform
from ndif.gateway.admin import AdminRoutes
from ndif.gateway.catalogue import Catalogue
from ndif.gateway.envelope_wire import WebSocketSubscriptions
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.health import HealthRoutes
from ndif.gateway.hf_mirror import HfMirror
from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.results import ResponseRoute, ResultRoute
from ndif.gateway.submit import SubmitRoute
from ndif.host.runtimes import Runtimes
from ndif.net import is_loopback
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
_FOREIGN_ORIGIN = (
    "This came from a web page of another site, or under a name that is not this machine's. "
    "A local server takes requests from programs on its own machine only."
)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application and the subscriptions of its connected clients."""

    app: Starlette
    websockets: WebSocketSubscriptions
    socket_io: SocketIoSubscriptions

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
    loopback: bool,
    perform: Perform,
    token: str | None,
) -> Gateway:
    """Return the gateway over these stores and models.

    `loopback` says that the server listens on a loopback address, where only this machine may connect.
    `perform` performs operations. Without an operator's `token` there are no `/admin` routes.
    """
    websockets, socket_io = WebSocketSubscriptions(broker), SocketIoSubscriptions(broker, settings)
    routes = [
        *SubmitRoute(settings, broker, responder, runtimes, catalogue, accounts).routes(),
        *websockets.routes(),
        *ResponseRoute(objects).routes(),
        # From any other store clients download their results directly.
        *(ResultRoute(objects).routes() if isinstance(objects, FileStore) else ()),
        *HealthRoutes(catalogue, accounts, runtimes).routes(),
        *(AdminRoutes(perform, token, settings).routes() if token else ()),
    ]
    app = create_app(routes, socket_io, hub, lifespan, loopback=loopback)
    return Gateway(app, websockets, socket_io)


def create_app(
    routes: Iterable[BaseRoute],
    socket_io: SocketIoSubscriptions,
    hub: HfMirror,
    lifespan: Lifespan[Starlette],
    *,
    loopback: bool,
) -> Starlette:
    """Return the application of `routes`, the Hugging Face mirror and Socket.IO."""
    return Starlette(
        routes=[
            *routes,
            Mount("/hub", routes=hub.routes()),
            Mount("/ws", app=socket_io.app),
        ],
        middleware=[Middleware(SameOrigin, loopback=loopback)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )


def uvicorn_config(app: Starlette, settings: Settings, listening: socket.socket) -> uvicorn.Config:
    """Return the configuration that serves `app` on the socket `listening`."""
    host, port = listening.getsockname()[:2]
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        # uvicorn's errors go where the server's own go.
        log_config=None,
        log_level="warning",
        access_log=False,
        # Results are compressed already where their client asked for it.
        ws_per_message_deflate=False,
        # A hybrid job's client uploads its results in one message.
        ws_max_size=settings.socketio_max_http_buffer_size,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )


class SameOrigin:
    """ASGI middleware that refuses requests from web pages of other sites.

    A page of any site may make a browser POST to 127.0.0.1 without asking, and a request is code that a
    local server runs. A browser names the page's site in `Origin`; nnsight's clients name this server
    there, or nothing. On a loopback server the Host header must name loopback as well: a site whose name
    resolves to 127.0.0.1 (DNS rebinding) has an origin that equals its host.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool) -> None:
        self._app = app
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] not in ("http", "websocket") or self._is_allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            # A WebSocket that is closed before it is accepted is refused with 403.
            await send({"type": "websocket.close", "code": 1008, "reason": "foreign origin"})
        else:
            await JSONResponse({"detail": _FOREIGN_ORIGIN}, 403)(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return False
        return not self._loopback or is_loopback(urlsplit(f"//{host}").hostname or "")
