"""Keeps web pages out of a server that trusts its user.

A page of any site may make a browser POST to 127.0.0.1 without asking, and a request here is code. A
browser says whose page it is in `Origin`; nnsight's clients name this server there, or nothing.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_FOREIGN = (
    "This came from a web page of another site, or under a name that is not this machine's. "
    "A local server takes requests from programs on its own machine only."
)


class SameOrigin:
    """ASGI middleware that refuses what a foreign page sends.

    On a loopback server the Host header must name loopback as well: a site whose name is made to
    resolve to 127.0.0.1 (DNS rebinding) is its own origin there.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool) -> None:
        self._app = app
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] in ("http", "websocket") and not self._welcome(Headers(scope=scope)):
            if scope["type"] == "websocket":
                # Closing before accepting is how a WebSocket is refused (403).
                await send({"type": "websocket.close", "code": 1008, "reason": "foreign origin"})
            else:
                await JSONResponse({"detail": _FOREIGN}, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _welcome(self, headers: Headers) -> bool:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return False
        return not self._loopback or is_loopback(urlsplit(f"//{host}").hostname or "")


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
