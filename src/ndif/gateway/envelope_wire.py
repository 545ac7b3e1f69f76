"""The wire of nnsight 0.8: a request in a multipart body, updates over a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.routing import BaseRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ndif.config.groups import RequestSettings
from ndif.errors import problems
from ndif.gateway.caller import caller_of, subscription_of
from ndif.gateway.connections import DOES_NOT_READ, disconnect
from ndif.gateway.http_error import CLOSE, HttpError, broker_unavailable, no_account
from ndif.gateway.incoming import MAX_ENVELOPE, IncomingPayload
from ndif.gateway.open_channels import OpenChannels
from ndif.gateway.openapi import DescribedChannel, LiveRoute
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.wires import envelope_fields, envelope_frame
from ndif.sizes import format_size
from ndif.stores.accounts import (
    Accounts,
    AccountsUnavailableError,
    NoSuchKeyError,
    TooManyGuessesError,
)
from ndif.stores.broker import Broker, BrokerError, Subscription
from ndif.tasks import end, within

logger = logging.getLogger(__name__)

_MAX_PART_HEADERS = 16 * 1024
_MAX_PARTS = 16
"""Maximum parts of a body; clients send 2. A part costs memory that the limit on bytes does not count."""
_PARSED_AT_ONCE = 16 * 1024
"""Bytes of the largest envelope that is parsed on the event loop: starting a thread would take longer."""
_FAREWELL_S = 1.0
"""Seconds to wait for a client to read its last message at shutdown."""
_DISCONNECTED = (WebSocketDisconnect, RuntimeError)
"""Errors that Starlette raises when the client is gone."""
REFUSED_SESSION = "refused"
"""Session id in the message that refuses a live channel; `POST /request` refuses jobs that name it."""
_REFUSED = 4000
"""Base of a refused live channel's close code: the HTTP status of the refusal is added to it."""


class Envelope(BaseModel):
    """The fields of a request besides its payload, as in `nnsight.schema.request.RequestModel` of 0.8.

    Clients of nnsight 0.8 send them as the part `data`; clients of the older wire send some in headers.
    """

    model_config = ConfigDict(protected_namespaces=(), strict=True)

    model_key: str
    session_id: str = ""
    """The id of the client's open subscription; empty if the client polls."""
    compress: bool = False
    env: dict[str, Any] = {}
    trusted: bool | None = None
    """False confines the block although the key is trusted; True grants no right."""


async def read_envelope(
    content_type: str, body: AsyncIterator[list[bytes]], payload: IncomingPayload
) -> Envelope:
    """Return the part `data` of the body of `POST /request`, and add the part `blob` to `payload`.

    Raise an `HttpError` if the body is malformed or its envelope too large.
    """
    try:
        parts = await _read_parts(content_type, body, payload)
    except FormParserError as error:
        raise HttpError(
            400, f"The multipart body cannot be read: {error}. Send it again."
        ) from error
    if missing := [name for name in ("data", "blob") if name not in parts]:
        raise HttpError(400, f"The multipart body lacks the part {missing[0]!r}.")
    content = bytes(parts["data"])
    try:
        if len(content) <= _PARSED_AT_ONCE:
            return Envelope.model_validate_json(content)
        return await asyncio.to_thread(Envelope.model_validate_json, content)
    except ValidationError as error:
        first = problems(error)[0]
        raise HttpError(
            400,
            f"The request's envelope is not valid: {first.place or 'data'}: {first.reason}.",
        ) from error


async def _read_parts(
    content_type: str, body: AsyncIterator[list[bytes]], payload: IncomingPayload
) -> dict[str, bytearray]:
    """Return the parts of a multipart body by name; the content of `blob` goes to `payload`.

    The caller limits the body's size. This function limits the number of parts, their headers, and the
    bytes outside `blob`. Raise a `FormParserError` if the body is not multipart or ends early.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise FormParserError("its Content-Type names no boundary")
    parts: dict[str, bytearray] = {}
    part, name, value = bytearray(), bytearray(), bytearray()
    part_count = header_size = envelope_size = 0
    is_payload = False

    def begin_part() -> None:
        nonlocal part, part_count, header_size, is_payload
        part, header_size, is_payload = bytearray(), 0, False
        part_count += 1
        if part_count > _MAX_PARTS:
            raise FormParserError(f"it has more than {_MAX_PARTS} parts")

    def add_data(data: bytes, start: int, end: int) -> None:
        nonlocal envelope_size
        content = memoryview(data)[start:end]
        if is_payload:
            payload.add(content)
            return
        envelope_size += len(content)
        if envelope_size > MAX_ENVELOPE:
            raise _too_large()
        part.extend(content)

    def add_header(text: bytearray, data: bytes, start: int, end: int) -> None:
        nonlocal header_size
        text += data[start:end]
        header_size += end - start
        if header_size > _MAX_PART_HEADERS:
            raise FormParserError("a part's headers are too long")

    def end_header() -> None:
        nonlocal is_payload
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(value))
            part_name = options.get(b"name", b"").decode("latin-1")
            if part_name in parts:
                raise FormParserError("it has two parts of one name")
            parts[part_name] = part
            is_payload = part_name == "blob"
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
    async for chunks in body:
        for chunk in chunks:
            parser.write(chunk)
        await payload.spill()
    parser.finalize()
    if parser.state != MultipartState.END:
        raise FormParserError("it ends before its last boundary")
    return parts


def _too_large() -> HttpError:
    return HttpError(
        413,
        f"The request's fields besides its payload are larger than {format_size(MAX_ENVELOPE)}. Is "
        "the client modified?",
        CLOSE,
    )


_CHANNEL = DescribedChannel(
    "/subscribe (live updates of nnsight 0.8)",
    "A WebSocket. The API key is in the header `ndif-api-key` of its handshake. The server's first message "
    'is `{"session_id": "…"}`, which the client names in the envelope of each job whose updates it wants '
    "here.\n\n"
    "Every further message is an update of a job, as `GET /response/{id}` answers it: text with "
    "JSON, or binary in the format of `torch.save` for COMPLETED with a small result inside. LOG has "
    "lines that the block printed. QUEUED, DISPATCHED and RUNNING are delayed by 0.1 s, and only the last "
    "of them is sent: a quick job has only its end. COMPLETED or ERROR is the last update of a job. The "
    "client sends nothing.\n\n"
    "A job whose only channel closes is ended. The server drops the connection of a client that does not "
    "read. A refused channel has one message: an ERROR with the reason, and the "
    f"`session_id` `{REFUSED_SESSION}`. `POST /request` with that id is refused with the same reason, "
    f"which nnsight shows. The channel then closes with {_REFUSED} plus the HTTP status of the refusal, "
    f"such as {_REFUSED + 401}. Only a page of another site, and a Host that is not this server, fail in "
    "the handshake.",
)


class WebSocketSubscriptions:
    """The subscriptions of clients at `/subscribe`.

    Opens one broker subscription per WebSocket, sends its id to the client, and forwards its frames. A
    subscription accepts only jobs of the account that opened it.
    """

    def __init__(
        self, broker: Broker, accounts: Accounts, channels: OpenChannels, settings: RequestSettings
    ) -> None:
        self._broker = broker
        self._accounts = accounts
        self._channels = channels
        self._max_unread_bytes = settings.max_unread_bytes
        self._open: dict[Subscription, WebSocket] = {}

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [LiveRoute("/subscribe", self.subscribe, _CHANNEL)]

    async def subscribe(self, websocket: WebSocket) -> None:
        """Send the id of a new subscription, then its frames until the client leaves."""
        caller, session_id = caller_of(websocket), uuid.uuid4().hex
        with contextlib.ExitStack() as counted:
            try:
                account = await self._accounts.account(caller)
                counted.enter_context(self._channels.count(caller, account))
                subscription = await self._broker.subscribe(
                    subscription_of(session_id, account.user)
                )
            except (NoSuchKeyError, TooManyGuessesError, AccountsUnavailableError) as error:
                await _refuse(websocket, no_account(error))
            except BrokerError as error:
                await _refuse(websocket, broker_unavailable(error))
            except HttpError as error:
                await _refuse(websocket, error)
            else:
                await self._serve(websocket, subscription, session_id)

    async def _serve(
        self, websocket: WebSocket, subscription: Subscription, session_id: str
    ) -> None:
        subscription.bound(
            self._max_unread_bytes, partial(disconnect, websocket.scope, DOES_NOT_READ)
        )
        forwarding = None
        try:
            await websocket.accept()
            await websocket.send_text(json.dumps({"session_id": session_id}))
            self._open[subscription] = websocket
            forwarding = asyncio.create_task(_forward(subscription, websocket))
            # Clients send nothing: wait for the disconnect.
            while (await websocket.receive())["type"] != "websocket.disconnect":
                pass
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
                with contextlib.suppress(*_DISCONNECTED, asyncio.TimeoutError):
                    await within(_send(websocket, frame), _FAREWELL_S)


async def _refuse(websocket: WebSocket, reason: HttpError) -> None:
    """Open a live channel only to refuse it, so that nnsight shows the reason.

    After a failed handshake, nnsight shows only headers. On an open channel, nnsight reads an id from the
    first message and sends its job with that id. `POST /request` refuses the job with the reason.
    """
    logger.info("a live channel is refused: %s", reason.detail)
    error_fields = envelope_fields(Response("", Status.ERROR, reason.detail))
    with contextlib.suppress(*_DISCONNECTED):
        await websocket.accept()
        await websocket.send_text(json.dumps({"session_id": REFUSED_SESSION, **error_fields}))
        await websocket.close(_REFUSED + reason.status_code)


async def _forward(subscription: Subscription, websocket: WebSocket) -> None:
    with contextlib.suppress(*_DISCONNECTED):
        while True:
            await _send(websocket, await subscription.next())


async def _send(websocket: WebSocket, frame: str | bytes) -> None:
    if isinstance(frame, bytes):
        await websocket.send_bytes(frame)
    else:
        await websocket.send_text(frame)
