"""The id of each request, and its line in the access log."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ndif.gateway.http_error import RETRY_SOON, HttpError, refuse, shown_path
from ndif.telemetry import metrics
from ndif.telemetry.model_labels import OTHER
from ndif.telemetry.request_id import HEADER, RequestId, name

logger = logging.getLogger("ndif.http")

REQUEST_ID = "request_id"
"""Key of the request's id in the state of its scope."""
_STOPPED = HttpError(
    503, "The server was stopped before it could answer. Try again in a moment.", RETRY_SOON
)
_UPGRADED = 101
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WebSocket"))


class RequestLog:
    """ASGI middleware that gives each request an id, and logs one line when it ends.

    The client's own id is used if it is well formed. The id is in the answer, and in every line logged
    while the request is open. The access line omits the query, which may hold a signature, and cuts the
    path.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = RequestId(Headers(scope=scope).getlist(HEADER))
        scope.setdefault("state", {})[REQUEST_ID] = request_id
        # Not reset here: uvicorn may still log about the request in the same task.
        name(request_id)
        await self._answer(scope, receive, send, request_id)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, request_id: RequestId
    ) -> None:
        began = time.monotonic()
        status = 0

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                status = message.get("status", _UPGRADED)
                if status == _UPGRADED:
                    metrics.WEBSOCKETS.labels(metrics.route_label(scope["path"])).inc()
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[HEADER] = request_id.text
            elif message["type"] == "websocket.close" and not status:
                status = 403
            await send(message)

        try:
            await self._app(scope, receive, observe)
        except asyncio.CancelledError:
            # uvicorn cancels requests that outlast the graceful shutdown.
            if status:
                raise
            await refuse(_STOPPED, scope, receive, observe)
        finally:
            address, _ = scope.get("client") or ("", 0)
            duration_s, method = time.monotonic() - began, scope.get("method", "WebSocket")
            logger.info(
                "%s %s %s %s %.3fs",
                address,
                method,
                shown_path(scope["path"]),
                status or "unanswered",
                duration_s,
            )
            route = metrics.route_label(scope["path"])
            label = method if method in _METHODS else OTHER
            metrics.REQUESTS.labels(route, label, status or "unanswered").inc()
            if scope["type"] == "http":
                metrics.REQUEST_SECONDS.labels(route).observe(duration_s)
            elif status == _UPGRADED:
                metrics.WEBSOCKETS.labels(route).dec()
        # Not in `finally`: after an error, uvicorn still logs it under this id.
        request_id.is_open = False


_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
