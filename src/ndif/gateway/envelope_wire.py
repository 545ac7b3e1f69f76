"""The wire of nnsight 0.8: a request in a multipart body, updates over a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ndif.errors import problems
from ndif.gateway.caller import caller_of, subscription_of
from ndif.gateway.http_error import HttpError, no_account, refuse
from ndif.schema.request import Submission
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.wires import envelope_frame
from ndif.stores.accounts import Accounts, NoSuchKeyError
from ndif.stores.broker import Broker, Subscription
from ndif.stores.guesses import TooManyGuessesError
from ndif.tasks import end

_MAX_PART_HEADERS = 16 * 1024
_MAX_PARTS = 16
"""A client sends two. Each costs more memory than its bytes, which are what the body's limit counts."""
_MAX_MESSAGE = 1 << 20
_MESSAGE_TOO_BIG = 1009
"""The close code of RFC 6455, section 7.4.1."""
_DISCONNECTED = (WebSocketDisconnect, RuntimeError)
"""Errors that Starlette raises when the client is gone."""


class Envelope(BaseModel):
    """The part `data` of a request: `nnsight.schema.request.RequestModel` of nnsight 0.8."""

    model_config = ConfigDict(protected_namespaces=(), strict=True)

    model_key: str
    session_id: str = ""
    compress: bool = False
    env: dict[str, Any] = {}


async def read_envelope(content_type: str, chunks: AsyncIterator[bytes]) -> Submission:
    """Read the body of `POST /request`: the parts `data`, an envelope, and `blob`, the payload.

    Whatever is wrong with it is an `HttpError`.
    """
    try:
        parts = await _read_parts(content_type, chunks)
    except FormParserError as error:
        raise HttpError(
            400, f"The multipart body cannot be read: {error}. Send it again."
        ) from error
    if missing := [name for name in ("data", "blob") if name not in parts]:
        raise HttpError(400, f"The multipart body lacks the part {missing[0]!r}.")
    try:
        envelope = Envelope.model_validate_json(bytes(parts["data"]))
    except ValidationError as error:
        first = problems(error)[0]
        raise HttpError(
            400,
            f"The request's envelope is not valid: {first.place or 'data'}: {first.reason}.",
        ) from error
    return Submission(
        envelope.model_key,
        subscription_id=envelope.session_id or None,
        compress=envelope.compress,
        env=envelope.env,
        payload=parts["blob"],
    )


async def _read_parts(content_type: str, chunks: AsyncIterator[bytes]) -> dict[str, bytearray]:
    """Return the parts of a multipart body by name, read into memory as they arrive.

    The caller limits the size of the body; this function limits the number of parts and their headers.
    A body that is not multipart or ends early is a `FormParserError`.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise FormParserError("its Content-Type names no boundary")
    parts: dict[str, bytearray] = {}
    part, name, value = bytearray(), bytearray(), bytearray()
    part_count = header_size = 0

    def begin_part() -> None:
        nonlocal part, part_count, header_size
        part, header_size = bytearray(), 0
        part_count += 1
        if part_count > _MAX_PARTS:
            raise FormParserError(f"it has more than {_MAX_PARTS} parts")

    def add_data(data: bytes, start: int, end: int) -> None:
        part.extend(memoryview(data)[start:end])

    def add_header(text: bytearray, data: bytes, start: int, end: int) -> None:
        nonlocal header_size
        text += data[start:end]
        header_size += end - start
        if header_size > _MAX_PART_HEADERS:
            raise FormParserError("a part's headers are too long")

    def end_header() -> None:
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(value))
            parts[options.get(b"name", b"").decode("latin-1")] = part
        name.clear()
        value.clear()

    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": begin_part,
            "on_part_data": add_data,
            "on_header_field": partial(add_header, name),
            "on_header_value": partial(add_header, value),
            "on_header_end": end_header,
        },
    )
    async for chunk in chunks:
        parser.write(chunk)
    parser.finalize()
    if parser.state != MultipartState.END:
        raise FormParserError("it ends before its last boundary")
    return parts


class WebSocketSubscriptions:
    """The subscriptions of clients at `/subscribe`.

    Opens one broker subscription per WebSocket, tells the client its id, and forwards its frames. Each
    takes the jobs of the account that opened it.
    """

    def __init__(self, broker: Broker, accounts: Accounts) -> None:
        self._broker = broker
        self._accounts = accounts
        self._open: dict[Subscription, WebSocket] = {}

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [WebSocketRoute("/subscribe", self.subscribe)]

    async def subscribe(self, websocket: WebSocket) -> None:
        """Send the id of a new subscription, then its frames until the client leaves."""
        try:
            account = await self._accounts.account(caller_of(websocket))
        except (NoSuchKeyError, TooManyGuessesError) as error:
            await refuse(no_account(error), websocket.scope, websocket.receive, websocket.send)
            return
        await websocket.accept()
        session_id = uuid.uuid4().hex
        subscription = await self._broker.subscribe(subscription_of(session_id, account.user))
        forwarding = None
        try:
            await websocket.send_text(json.dumps({"session_id": session_id}))
            self._open[subscription] = websocket
            forwarding = asyncio.create_task(_forward(subscription, websocket))
            while (message := await websocket.receive())["type"] != "websocket.disconnect":
                # A client has nothing to send here.
                if len(message.get("bytes") or message.get("text") or "") > _MAX_MESSAGE:
                    await websocket.close(_MESSAGE_TOO_BIG)
                    break
        finally:
            self._open.pop(subscription, None)
            await subscription.close()
            if forwarding is not None:
                await end([forwarding])

    async def fail_all(self, description: str) -> None:
        """Send every subscribed client an ERROR with this description for each of its unfinished jobs."""
        for subscription, websocket in list(self._open.items()):
            for request_id in list(subscription.unfinished):
                frame = envelope_frame(Response(request_id, Status.ERROR, description))
                with contextlib.suppress(*_DISCONNECTED):
                    await _send(websocket, frame)


async def _forward(subscription: Subscription, websocket: WebSocket) -> None:
    with contextlib.suppress(*_DISCONNECTED):
        while True:
            await _send(websocket, await subscription.next())


async def _send(websocket: WebSocket, frame: str | bytes) -> None:
    if isinstance(frame, bytes):
        await websocket.send_bytes(frame)
    else:
        await websocket.send_text(frame)
