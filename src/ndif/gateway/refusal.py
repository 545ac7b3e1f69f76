"""A request that is turned away, with a sentence that says what to do."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

logger = logging.getLogger(__name__)

_RETRY_S = 5
_SHOWN = 200
"""How much of a path is repeated to who asked for it."""


class Refusal(Exception):  # noqa: N818 - it is what it is called
    """An HTTP answer of 4xx or 5xx in the form clients read: `{"detail": …}`."""

    def __init__(
        self, status: int, detail: str, *, close: bool = False, retry_after_s: int | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.close = close
        """Whether the rest of the request's body is not worth reading."""
        self.retry_after_s = retry_after_s
        """When the same request may be answered otherwise."""


async def answer(_: Request, error: Exception) -> Response:
    """A `Refusal` as a response."""
    assert isinstance(error, Refusal)  # noqa: S101 - registered for nothing else
    headers = {"Connection": "close"} if error.close else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return JSONResponse({"detail": error.detail}, error.status, headers)


async def answer_broker_away(request: Request, error: Exception) -> Response:
    """A broker that takes no request: the log says why, and the client when to try again."""
    logger.warning("%s", error)
    detail = f"This server cannot take requests now: {error}. Try again in a moment."
    return await answer(request, Refusal(503, detail, retry_after_s=_RETRY_S))


async def answer_store_away(request: Request, error: Exception) -> Response:
    """An object store that cannot be reached: the log says why, and the client when to try again."""
    logger.warning("%s", error)
    detail = "This server cannot reach its store of results and responses. Try again in a moment."
    return await answer(request, Refusal(503, detail, retry_after_s=_RETRY_S))


async def answer_unknown(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route or method), in the same form."""
    assert isinstance(error, HTTPException)  # noqa: S101
    path = request.url.path[:_SHOWN]
    if error.status_code == 404:
        detail = (
            f"There is nothing at {path}. nnsight uses /request, /response/ID, "
            "/results/ID, /subscribe, /ws/socket.io, /status, /env, /ping and /connected."
        )
    else:
        detail = f"{request.method} is not possible at {path}."
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


async def answer_failure(_: Request, __: Exception) -> Response:
    """What nobody foresaw; the log has it."""
    return JSONResponse({"detail": "The server failed at this request; its log says why."}, 500)
