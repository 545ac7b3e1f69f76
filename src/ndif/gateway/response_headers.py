"""Default security and cache headers, which every answer has unless its route sets its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ndif.config.groups import GatewaySettings

SAFE: Mapping[str, str] = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; frame-ancestors 'none'",
}
"""Headers of every answer: browsers must not sniff, frame, run or embed it."""
NOT_STORED: Mapping[str, str] = {"Cache-Control": "no-store"}
"""Headers of answers for one user or one moment, which no cache may keep."""

_CACHED = "/hub/"
"""Path prefix of model files, which clients and proxies may cache by ETag."""
_HSTS = {"Strict-Transport-Security": "max-age=31536000"}
_STARTS = ("http.response.start", "websocket.http.response.start")


class ResponseHeaders:
    """ASGI middleware that adds these headers to each answer that lacks them.

    If the public URL is https, it adds HSTS.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self._app = app
        hsts = _HSTS if settings.is_behind_tls else {}
        self._cached = {**SAFE, **hsts}
        self._others = {**self._cached, **NOT_STORED}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = self._cached if scope["path"].startswith(_CACHED) else self._others
            send = partial(_send, send, headers)
        await self._app(scope, receive, send)


async def _send(send: Send, added: Mapping[str, str], message: Message) -> None:
    if message["type"] in _STARTS:
        headers = MutableHeaders(scope=message)
        for name, value in added.items():
            headers.setdefault(name, value)
    await send(message)
