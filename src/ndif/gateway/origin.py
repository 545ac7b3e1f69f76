"""Checks of the Host and Origin headers: the server's own names, and the web pages that may use it."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from functools import cache
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ndif.config.groups import GatewaySettings
from ndif.gateway.http_error import HttpError, refuse
from ndif.gateway.peer import unmapped
from ndif.net import is_loopback, reachable_as
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
_HOST = re.compile(r"(\[[0-9a-f:.]+(%[\w.-]+)?\]|[\w.-]+)(:\d{1,5})?", re.ASCII | re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}
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
        allowed = [*settings.allowed_host_names, host]
        if self._public_origin is not None:
            allowed.append(self._public_origin[1])
        self._names = {name.lower().rstrip(".") for name in allowed if "*" not in name}
        self._suffixes = tuple(name[1:].lower() for name in allowed if name.startswith("*."))
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
        name = _name_of(host)
        if len(hosts) > 1 or name is None:
            return HttpError(
                HTTPStatus.BAD_REQUEST,
                f"The request's Host, {', '.join(hosts)[:_MAX_QUOTED]!r}, is not one valid host.",
            )
        if origin not in (None, "null") and _origin(origin) is None:
            return HttpError(
                HTTPStatus.BAD_REQUEST,
                f"The request's Origin, {origin[:_MAX_QUOTED]!r}, is not a valid origin of a web page.",
            )
        if name and not await self._is_ours(name):
            if not _is_address(name):
                return HttpError(
                    HTTPStatus.FORBIDDEN,
                    f"This server does not answer to the name {host[:_MAX_QUOTED]!r}. If that is how its "
                    "users reach it, its operator names it in NDIF_PUBLIC_URL (behind a proxy with TLS) or "
                    "in NDIF_ALLOWED_HOSTS.",
                )
            if scope["path"] == _SUBMIT and not _is_reached(name, scope):
                return HttpError(
                    HTTPStatus.FORBIDDEN,
                    f"This server does not know {host[:_MAX_QUOTED]!r} as its own address, but the URLs "
                    "of results would begin with it. If that is how its users reach it, its operator names "
                    "it in NDIF_PUBLIC_URL or in NDIF_ALLOWED_HOSTS.",
                )
        if origin is None or any_origin or self._is_same(origin, host):
            return None
        if origin in self._allowed_origins and not scope["path"].startswith(_OPERATOR_PATHS):
            return None
        return HttpError(
            HTTPStatus.FORBIDDEN,
            f"This came from a web page of another site, {origin[:_MAX_QUOTED]!r}. A server takes requests "
            "from programs, and from pages at its own address alone. If that is its address, its operator "
            "names it in NDIF_PUBLIC_URL; if it is a site that may use this server, in NDIF_CORS_ORIGINS.",
        )

    async def _is_ours(self, name: str) -> bool:
        if self._any or name in self._names or name.endswith(self._suffixes) or is_loopback(name):
            return True
        # `getfqdn` may block on DNS.
        return not _is_address(name) and name in await asyncio.to_thread(_machine_names)

    def _is_same(self, origin: str, host: str) -> bool:
        """Return True if a page's origin equals the requested host's or the public URL's origin."""
        page = _origin(origin)
        return page is not None and page in (_origin(f"{page[0]}://{host}"), self._public_origin)


def _name_of(host: str) -> str | None:
    """Return the name or address in a Host header ("" for an empty one); None if it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        is_whole = not host or (_HOST.fullmatch(host) and parts.port != 0)
    except ValueError:
        return None
    return (parts.hostname or "").rstrip(".") if is_whole else None


def _origin(url: str) -> tuple[str, str, int | None] | None:
    """Return a URL's scheme, host and port; None if it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@cache
def _machine_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return frozenset({name, short, f"{short}.local", socket.getfqdn().lower()})


def _is_reached(name: str, scope: Scope) -> bool:
    """Return True if the IP address `name` is the local address of the request's connection."""
    server = scope.get("server")
    if not server:
        return False
    local_address = unmapped(server[0]).partition("%")[0]
    return _is_address(local_address) and ipaddress.ip_address(
        unmapped(name.partition("%")[0])
    ) == ipaddress.ip_address(local_address)


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope.get("method") == "OPTIONS" and "access-control-request-method" in headers
