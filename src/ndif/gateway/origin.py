"""Checks of the Host and Origin headers: the server's own names, and the web pages that may use it."""

from __future__ import annotations

import asyncio
import socket
from functools import cache
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ndif.config.groups import GatewaySettings
from ndif.gateway.authority import Authority, Origin
from ndif.gateway.http_error import HttpError, refuse
from ndif.hostname import HostName, host_name, is_wildcard
from ndif.net import reachable_as
from ndif.telemetry.request_id import HEADER

_PUBLIC_PATHS = frozenset({"/ping", "/status", "/env"})
"""Paths that web pages of any site may read on a public server."""
_OPERATOR_PATHS = ("/admin", "/login", "/logout", "/session")
"""Path prefixes closed to pages of every other site, even of sites in NDIF_CORS_ORIGINS."""
_READ_METHODS = ("GET", "HEAD")
_CLIENT_METHODS = (*_READ_METHODS, "POST", "DELETE")
"""Methods of the routes that clients use."""
_CLIENT_HEADERS = (
    *("ndif-api-key", "nnsight-version", "python-version", "nnsight-model-key", "nnsight-compress"),
    *("ndif-session_id", "ndif-timestamp", "ndif-callback", "Range", HEADER),
)
"""Request headers of clients, in addition to the CORS-safelisted ones."""
_EXPOSED_HEADERS = (HEADER, "Retry-After")
"""Response headers that a page may read, in addition to the CORS-safelisted ones."""
_SUBMIT = "/request"
"""Path whose Host header becomes the base URL of the job's results."""
_MAX_QUOTED = 200
"""Characters of a client's header that an answer repeats."""


class SameOrigin:
    """ASGI middleware that refuses requests with a foreign Host, and from web pages of other sites.

    A page of any site can make a browser POST to this machine without a preflight, and a request is code.
    The browser names the page's site in `Origin`; nnsight's clients send this server's origin or none.

    With DNS rebinding, a foreign page's origin equals its Host. So the Host must be a name of this server:
    a loopback name, the listening host, the machine's name, the host of the public URL, or one of
    NDIF_ALLOWED_HOSTS. IP addresses pass, because rebinding needs a name. At `/request` an address must be
    the one that the connection reached, because the URLs of results begin with it.

    `0.0.0.0` is no host, although it leads to loopback. A name below `localhost` is not this server's:
    another program may serve pages there, and not every resolver keeps such names on the machine.

    Origins in NDIF_CORS_ORIGINS pass, except at the operator's routes. Starlette's `CORSMiddleware` answers
    preflights and sets CORS headers. Only the operator's routes read cookies (`gateway/operator.py`).
    """

    def __init__(self, app: ASGIApp, *, settings: GatewaySettings, host: str) -> None:
        """Wrap `app`, which listens on `host`."""
        self._app = app
        self._allowed_origins = settings.cors_origin_names
        self._open = CORSMiddleware(
            app, ("*",), _READ_METHODS, (HEADER,), expose_headers=_EXPOSED_HEADERS
        )
        self._named = CORSMiddleware(
            app,
            self._allowed_origins,
            _CLIENT_METHODS,
            _CLIENT_HEADERS,
            expose_headers=_EXPOSED_HEADERS,
        )
        self._public_origin = _origin(settings.public_url)
        self._is_public = reachable_as(host, settings.public_url) is not None
        allowed = settings.allowed_host_names
        named = [host_name(name) for name in allowed if "*" not in name]
        named.append(None if is_wildcard(host) else host_name(host))
        if self._public_origin is not None:
            named.append(self._public_origin.authority.host)
        self._names = {name for name in named if name is not None}
        domains = [host_name(name[2:]) for name in allowed if name.startswith("*.")]
        self._suffixes = tuple(f".{domain.text}" for domain in domains if domain is not None)
        self._any = "*" in allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_open = (
            self._is_public
            and scope["path"] in _PUBLIC_PATHS
            and (scope.get("method") in _READ_METHODS or _is_preflight(scope, headers))
        )
        problem = await self._problem(headers, scope, any_origin=is_open)
        if problem is not None:
            await refuse(problem, scope, receive, send)
        else:
            await (self._open if is_open else self._named)(scope, receive, send)

    async def _problem(
        self, headers: Headers, scope: Scope, *, any_origin: bool
    ) -> HttpError | None:
        """Return the refusal of the request; None if it may pass."""
        hosts, origin = headers.getlist("host"), headers.get("origin")
        host = hosts[0] if hosts else ""
        requested = _authority(host)
        if len(hosts) > 1 or (host and requested is None):
            return HttpError(
                HTTPStatus.BAD_REQUEST,
                f"The request's Host, {', '.join(hosts)[:_MAX_QUOTED]!r}, is not one valid host.",
            )
        if origin not in (None, "null") and _origin(origin) is None:
            return HttpError(
                HTTPStatus.BAD_REQUEST,
                f"The request's Origin, {origin[:_MAX_QUOTED]!r}, is not a valid origin of a web page.",
            )
        if requested is not None and not await self._is_ours(requested.host, scope):
            if requested.host.is_wildcard:
                return HttpError(
                    HTTPStatus.FORBIDDEN,
                    f"{host[:_MAX_QUOTED]!r} stands for every address of a machine. Use 127.0.0.1 on the "
                    "server's machine, and its name or address on another.",
                )
            if requested.host.address is None or requested.host.is_ambiguous:
                return HttpError(
                    HTTPStatus.FORBIDDEN,
                    f"This server does not answer to the name {host[:_MAX_QUOTED]!r}. If that is how its "
                    "users reach it, its operator names it in NDIF_PUBLIC_URL (behind a proxy with TLS) or "
                    "in NDIF_ALLOWED_HOSTS.",
                )
            if scope["path"] == _SUBMIT:
                return HttpError(
                    HTTPStatus.FORBIDDEN,
                    f"This server does not know {host[:_MAX_QUOTED]!r} as its own address, but the URLs "
                    "of results would begin with it. If that is how its users reach it, its operator names "
                    "it in NDIF_PUBLIC_URL or in NDIF_ALLOWED_HOSTS.",
                )
        if origin is None or any_origin or self._is_same(origin, requested):
            return None
        if origin in self._allowed_origins and not scope["path"].startswith(_OPERATOR_PATHS):
            return None
        return HttpError(
            HTTPStatus.FORBIDDEN,
            f"This came from a web page of another site, {origin[:_MAX_QUOTED]!r}. A server takes requests "
            "from programs, and from pages at its own address alone. If that is its address, its operator "
            "names it in NDIF_PUBLIC_URL; if it is a site that may use this server, in NDIF_CORS_ORIGINS.",
        )

    async def _is_ours(self, host: HostName, scope: Scope) -> bool:
        if self._any or host in self._names or host.is_loopback or _is_reached(host, scope):
            return True
        if host.address is not None:
            return False
        # `getfqdn` may block on DNS.
        return host.text.endswith(self._suffixes) or host in await asyncio.to_thread(_machine_names)

    def _is_same(self, origin: str, requested: Authority | None) -> bool:
        """Return True if a page's origin equals the requested host's or the public URL's origin."""
        page = _origin(origin)
        if page is None:
            return False
        return page == self._public_origin or (requested is not None and page.is_at(requested))


def _authority(host: str) -> Authority | None:
    """Return the host and port of a Host header; None if it is empty or malformed."""
    try:
        return Authority.parse(host)
    except ValueError:
        return None


def _origin(url: str) -> Origin | None:
    """Return the origin of a URL; None if it has none."""
    try:
        return Origin.parse(url)
    except ValueError:
        return None


@cache
def _machine_names() -> frozenset[HostName]:
    name = socket.gethostname()
    short = name.partition(".")[0]
    names = map(host_name, (name, short, f"{short}.local", socket.getfqdn()))
    return frozenset(name for name in names if name is not None)


def _is_reached(host: HostName, scope: Scope) -> bool:
    """Return True if `host` is the local IP address of the request's connection."""
    local_address, _ = scope.get("server") or ("", None)
    return host.address is not None and host == host_name(local_address)


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope.get("method") == "OPTIONS" and "access-control-request-method" in headers
