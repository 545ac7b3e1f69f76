"""Errors as HTTP responses: `HttpError`, and one table of the server's exceptions and their answers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ndif.cluster.models import NotServedError
from ndif.gateway.openapi import JSON, Refusal, json_response
from ndif.gateway.response_headers import NOT_STORED, SAFE
from ndif.schema.answer import to_json
from ndif.schema.deployment import OperationError
from ndif.stores.accounts import AccountsUnavailableError, NoSuchKeyError, TooManyGuessesError
from ndif.stores.broker import BrokerError, QueueFullError, TooManyJobsError
from ndif.stores.objects import DiskError, ObjectStoreError
from ndif.telemetry.request_id import HEADER, current

logger = logging.getLogger(__name__)

RETRY_SOON = {"Retry-After": "5"}
"""Headers of a refusal that may be lifted in a few seconds."""
CLOSE = {"Connection": "close"}
"""Headers of an answer that leaves the rest of the request's body unread."""

_MAX_PATH = 200
"""Characters of a request's path that an answer or a log repeats."""


class HttpError(HTTPException):
    """An answer of 4xx or 5xx in the form that clients read: `{"detail": "A sentence."}`."""


def shown_path(path: str) -> str:
    """Return a request's path for a message or a log line: printable, and cut to 200 characters."""
    cut = path[:_MAX_PATH]
    if not cut.isprintable():
        cut = cut.encode("unicode_escape").decode()
    return cut if len(path) <= _MAX_PATH else f"{cut}…"


def no_channel_at(path: str) -> HttpError:
    """Return the answer to a WebSocket handshake at a path without a channel."""
    return HttpError(
        404,
        f"No WebSocket opens at {shown_path(path)}. nnsight 0.8 uses /subscribe; 0.7 and 0.6 use "
        "/ws/socket.io.",
    )


def nothing_at(path: str) -> HttpError:
    """Return the answer to a request at a path that has no route."""
    return HttpError(
        404,
        f"There is nothing at {shown_path(path)}. nnsight uses /request, /response/ID, /results/ID, "
        "/subscribe, /ws/socket.io, /status, /env, /ping and /connected; one's own jobs are at /requests "
        "and /usage, and a model's modules at /models/NAME.",
    )


def _no_route(request: Request, error: HTTPException) -> HttpError:
    """Translate Starlette's own `HTTPException`, such as 404 or 405."""
    if error.status_code == 404:
        return nothing_at(request.url.path)
    detail = f"{request.method} is not possible at {shown_path(request.url.path)}."
    return HttpError(error.status_code, detail, error.headers)


def broker_unavailable(error: BrokerError) -> HttpError:
    """Return the answer to a request or a WebSocket that the broker cannot take now."""
    logger.warning("%s", error)
    detail = f"This server cannot take requests now: {error}. Try again in a moment."
    return HttpError(503, detail, RETRY_SOON)


def _disk_refuses(_: Request, error: DiskError) -> HttpError:
    logger.error("%s", error)
    detail = f"This server cannot answer now: {error}. Try again later, or tell its operator."
    return HttpError(503, detail, RETRY_SOON)


def _store_unavailable(_: Request, error: ObjectStoreError) -> HttpError:
    # The message names the store's address, which clients must not see.
    logger.warning("%s", error)
    detail = "This server cannot reach its store of results and responses. Try again in a moment."
    return HttpError(503, detail, RETRY_SOON)


def no_account(error: NoSuchKeyError | TooManyGuessesError | AccountsUnavailableError) -> HttpError:
    """Return the answer to a caller whose account is missing or cannot be looked up."""
    if isinstance(error, AccountsUnavailableError):  # its message is not for clients
        return HttpError(
            503,
            "This server cannot reach its database of API keys. Try again in a moment.",
            RETRY_SOON,
        )
    if isinstance(error, TooManyGuessesError):
        return HttpError(429, str(error), {"Retry-After": str(math.ceil(error.wait_s))})
    return HttpError(401, str(error))


def written(answer: HttpError) -> bytes:
    """Return an answer as raw HTTP/1.1, with `Connection: close`, for a request without an application."""
    content = to_json(Refusal(detail=answer.detail))
    status = HTTPStatus(answer.status_code)
    headers = {
        **SAFE,
        **NOT_STORED,
        **(answer.headers or {}),
        HEADER: current().text,
        "Content-Type": JSON,
        "Content-Length": str(len(content)),
        **CLOSE,
    }
    lines = (f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n{''.join(lines)}\r\n"
    return head.encode("latin-1") + content


def _response(answer: HttpError) -> Response:
    return json_response(Refusal(detail=answer.detail), answer.status_code, answer.headers)


async def refuse(answer: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or refuse a WebSocket's handshake."""
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get(
        "extensions", {}
    ):
        # ASGI: a close before the accept refuses the handshake with 403.
        await send({"type": "websocket.close", "code": 1008, "reason": "refused"})
    else:
        await _response(answer)(scope, receive, send)


_HTTP_ERRORS: Mapping[type[Exception], Callable[[Request, Any], HttpError]] = {
    HttpError: lambda _, error: error,
    ClientDisconnect: lambda _, __: HttpError(400, "The client left before its request was read."),
    HTTPException: _no_route,
    NoSuchKeyError: lambda _, error: no_account(error),
    TooManyGuessesError: lambda _, error: no_account(error),
    AccountsUnavailableError: lambda _, error: no_account(error),
    NotServedError: lambda _, error: HttpError(400, str(error)),
    OperationError: lambda _, error: HttpError(
        error.status, str(error), RETRY_SOON if error.status == 503 else None
    ),
    TooManyJobsError: lambda _, error: HttpError(429, str(error), RETRY_SOON),
    BrokerError: lambda _, error: broker_unavailable(error),
    DiskError: _disk_refuses,
    ObjectStoreError: _store_unavailable,
    # Starlette raises it again afterwards, so that the log has the traceback.
    Exception: lambda _, __: HttpError(500, "The server failed at this request; its log says why."),
}


_REASONS: Mapping[int, str] = {
    400: "invalid",
    401: "key",
    403: "right",
    408: "slow",
    409: "channel",
    413: "size",
    429: "limit",
}
_REASONS_BY_ERROR: Mapping[type[BaseException], str] = {
    NoSuchKeyError: "key",
    TooManyGuessesError: "guesses",
    AccountsUnavailableError: "accounts",
    OperationError: "unavailable",
    NotServedError: "model",
    TooManyJobsError: "jobs",
    QueueFullError: "queue_bytes",
    BrokerError: "broker",
    DiskError: "disk",
    ObjectStoreError: "store",
    ClientDisconnect: "left",
    asyncio.CancelledError: "left",
}


def reason_of(error: BaseException) -> str:
    """Return the metrics label for the reason why a job was not accepted."""
    if isinstance(error, HTTPException):
        return _REASONS.get(error.status_code, "unavailable")
    labels = (label for kind, label in _REASONS_BY_ERROR.items() if isinstance(error, kind))
    return next(labels, "failure")


async def _handle(
    translate: Callable[[Request, Any], HttpError], request: Request, error: Exception
) -> Response:
    return _response(translate(request, error))


EXCEPTION_HANDLERS: Mapping[Any, Any] = {
    kind: partial(_handle, translate) for kind, translate in _HTTP_ERRORS.items()
}
"""Starlette's exception handlers, for every error that a route may raise."""
