"""The gateway: every route of a server in one ASGI application."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ndif.config.settings import Settings
from ndif.control.leader import Leader
from ndif.gateway.admin import AdminRoutes
from ndif.gateway.callbacks import CallbackRoute
from ndif.gateway.connection_limit import ConnectionLimit, default_limit
from ndif.gateway.connections import limited
from ndif.gateway.documents import Documents
from ndif.gateway.envelope_wire import WebSocketSubscriptions
from ndif.gateway.header_wire import CHANNEL, SocketIoSubscriptions
from ndif.gateway.health import HealthRoutes
from ndif.gateway.hf_mirror import HfMirror
from ndif.gateway.http_error import EXCEPTION_HANDLERS, no_channel_at, nothing_at, refuse
from ndif.gateway.incoming import Incoming
from ndif.gateway.jobs import JobRoutes
from ndif.gateway.login import LoginRoutes
from ndif.gateway.metrics import MetricsRoute
from ndif.gateway.model_pages import ModelRoutes
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.openapi import LiveMount
from ndif.gateway.operator import Operators
from ndif.gateway.origin import SameOrigin
from ndif.gateway.quota import Quota
from ndif.gateway.request_log import RequestLog
from ndif.gateway.response_headers import ResponseHeaders
from ndif.gateway.results import ResponseRoute, ResultRoute
from ndif.gateway.sessions import Sessions
from ndif.gateway.submit import SubmitRoute
from ndif.host.runtimes import Runtimes
from ndif.queue.callbacks.guard import CallbackRules
from ndif.stores.broker import Broker
from ndif.stores.objects import FileStore
from ndif.stores.rate_limiter import Rates
from ndif.stores.stores import Stores

_SHUTDOWN_S = 3
"""Seconds that open connections have to end at shutdown."""
_STOPPED = (
    "The server was stopped before this job was done. Send it again: another of its hosts answers, or "
    "this one once it is back."
)


class Pages(Protocol):
    """Web pages that a gateway serves in addition to its routes."""

    def routes(self) -> list[BaseRoute]:
        """Return the pages' routes."""

    def admit(self, is_operator: Callable[[HTTPConnection], bool], port: int | None) -> None:
        """Open the users' pages to operators, and show the operators' views on `port` (None: on any)."""

    def close(self) -> None:
        """End the pages' open streams."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The application and the subscriptions of its connected clients."""

    app: ASGIApp
    websockets: WebSocketSubscriptions
    socket_io: SocketIoSubscriptions
    incoming: Incoming
    pages: Pages

    async def announce_shutdown(self) -> None:
        """End the pages' streams, and send subscribed clients an ERROR for each unfinished job."""
        self.pages.close()
        await asyncio.gather(self.websockets.fail_all(_STOPPED), self.socket_io.fail_all(_STOPPED))


@dataclass(frozen=True)
class GatewayOptions:
    """The address of a gateway, and the secrets that its routes check."""

    host: str
    """Name or address that the server listens on."""
    callbacks: CallbackRules
    token: str | None = None
    """Bearer token of `/admin/*`; None removes these routes."""
    admin: socket.socket | None = None
    """Separate socket for the operator's routes; None serves them on the main socket."""
    session_secrets: Sequence[str] = ()
    """Secrets of operators' logins; the first one signs. If empty, the token signs."""


def create_gateway(
    settings: Settings,
    options: GatewayOptions,
    stores: Stores[Broker],
    leader: Leader,
    runtimes: Runtimes,
    hub: HfMirror,
    pages: Pages,
    lifespan: Lifespan[Starlette],
) -> Gateway:
    """Return the gateway of these stores and `leader`; the main and the operator's socket serve `pages`."""
    broker, objects, accounts, admin = stores.broker, stores.objects, stores.accounts, options.admin
    rates = Rates(settings.broker_url)
    channels = OpenChannels(settings)
    websockets = WebSocketSubscriptions(broker, accounts, channels, settings)
    socket_io = SocketIoSubscriptions(broker, channels, settings)
    incoming = Incoming(settings)
    callbacks = CallbackRoute(settings, options.callbacks, accounts, stores.callbacks)
    submit = SubmitRoute(
        settings,
        stores,
        leader,
        runtimes,
        incoming,
        Quota(settings, leader.perform, rates),
        callbacks,
        channels,
    )
    routes = [
        *submit.routes(),
        *callbacks.routes(),
        *websockets.routes(),
        *JobRoutes(accounts, leader.perform, objects).routes(),
        *ResponseRoute(objects, leader.update_of, accounts).routes(),
        # Other stores let clients download results directly.
        *(ResultRoute(objects).routes() if isinstance(objects, FileStore) else ()),
    ]
    endpoint = os.environ.get("HF_ENDPOINT")
    models = ModelRoutes(leader, runtimes, settings.public_url, endpoint).routes()
    health = [*HealthRoutes(leader, accounts, runtimes).routes(), *models, *pages.routes()]
    operators = _operators_routes(settings, options, stores, leader, rates, pages)
    if admin is None:
        app = create_app(
            [*routes, *health, *operators], socket_io, hub, lifespan, settings, host=options.host
        )
    else:
        address, port = admin.getsockname()[:2]
        app = ByPort(
            create_app([*routes, *health], socket_io, hub, lifespan, settings, host=options.host),
            {port: _application([*health, *operators], settings, address)},
        )
    return Gateway(app, websockets, socket_io, incoming, pages)


def _operators_routes(
    settings: Settings,
    options: GatewayOptions,
    stores: Stores[Broker],
    leader: Leader,
    rates: Rates,
    pages: Pages,
) -> list[BaseRoute]:
    """Return the metrics route, and with a token also the routes for logins and operators."""
    token, admin, registry = options.token, options.admin, stores.accounts.registry
    networks, folder = settings.allowed_metrics_networks, stores.objects.folder
    routes = MetricsRoute(leader.perform, stores.pings, folder, networks, token).routes()
    if token:
        password = settings.admin_password_hash.get_secret_value()
        secrets = options.session_secrets or (token,)
        sessions = Sessions(
            secrets, password, settings.admin_session_s, is_behind_tls=settings.is_behind_tls
        )
        operators = Operators(token, sessions)
        pages.admit(operators.is_logged_in, None if admin is None else admin.getsockname()[1])
        routes += LoginRoutes(operators, password, rates, leader.record).routes()
        routes += AdminRoutes(leader.perform, operators, settings, registry, leader.record).routes()
    return routes


def create_app(
    routes: Iterable[BaseRoute],
    socket_io: SocketIoSubscriptions,
    hub: HfMirror,
    lifespan: Lifespan[Starlette],
    settings: Settings,
    *,
    host: str,
) -> ASGIApp:
    """Return the application for `host`: `routes`, the Hugging Face mirror and Socket.IO."""
    mounted = Mount("/hub", routes=hub.routes()), LiveMount("/ws", socket_io.app, CHANNEL)
    return _application([*routes, *mounted], settings, host, lifespan)


class ByPort:
    """ASGI application that dispatches by the connection's port, which no client or proxy can forge."""

    def __init__(self, app: ASGIApp, others: Mapping[int, ASGIApp]) -> None:
        self._app = app
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Lifespan events have no port and go to the main application.
        _, port = scope.get("server") or ("", 0)
        await self._others.get(port, self._app)(scope, receive, send)


def _application(
    routes: Sequence[BaseRoute],
    settings: Settings,
    host: str,
    lifespan: Lifespan[Starlette] | None = None,
) -> ASGIApp:
    routes = [*routes, *Documents(routes).routes()]
    starlette = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS, lifespan=lifespan)
    starlette.router.default = _no_route
    # Outside Starlette, because its own answers to unhandled errors need the middleware, too.
    app = SameOrigin(starlette, settings=settings, host=host)
    return OneSlash(ResponseHeaders(RequestLog(app), settings))


class OneSlash:
    """ASGI middleware that serves `//path` as `/path`.

    Clients append routes to their NDIF_HOST, which may end with a slash.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").startswith("//"):
            scope = {**scope, "path": f"/{scope['path'].lstrip('/')}"}
            if scope.get("raw_path"):
                scope["raw_path"] = b"/" + scope["raw_path"].lstrip(b"/")
        await self._app(scope, receive, send)


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    is_channel = scope["type"] == "websocket"
    answer = no_channel_at(scope["path"]) if is_channel else nothing_at(scope["path"])
    await refuse(answer, scope, receive, send)


def uvicorn_config(
    app: ASGIApp, incoming: Incoming, settings: Settings, listening: socket.socket
) -> uvicorn.Config:
    """Return the configuration that serves a gateway's application on the socket `listening`."""
    host, port = listening.getsockname()[:2]
    proxies = ProxyHeadersMiddleware(app, settings.proxies).trusted_hosts  # type: ignore[arg-type]
    connections = ConnectionLimit(settings.max_connections or default_limit(), proxies.__contains__)
    return uvicorn.Config(
        app,
        **limited(incoming, connections),
        host=host,
        port=port,
        # Keep the server's own logging configuration.
        log_config=None,
        log_level="warning",
        access_log=False,  # `RequestLog` writes it
        server_header=False,
        forwarded_allow_ips=settings.proxies,
        # Results are already compressed if the client asked for it.
        ws_per_message_deflate=False,
        # A hybrid job's client uploads its results in one message.
        ws_max_size=settings.socketio_max_http_buffer_size,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
