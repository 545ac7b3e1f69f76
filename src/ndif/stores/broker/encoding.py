"""Requests and updates as bytes that travel between processes of this server, and are never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from struct import Struct
from typing import Any

from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status

_LENGTH = Struct(">I")
_FEW_WORDS = 200
_ELSEWHERE = frozenset({"payload", "receipt"})
_PLAIN = tuple(f.name for f in fields(Request) if f.name not in {*_ELSEWHERE, "model", "wire"})


def encode_request(request: Request) -> bytes:
    """All of it but its payload."""
    said = {name: getattr(request, name) for name in _PLAIN}
    said |= {"model": str(request.model), "wire": request.wire.value, "env": dict(request.env)}
    return json.dumps(said, separators=(",", ":")).encode()


def decode_request(content: bytes, receipt: str = "") -> Request:
    """What `encode_request` was given, without its payload."""
    said = json.loads(content)
    said |= {"model": ModelKey.parse(said["model"]), "wire": Wire(said["wire"])}
    return Request(payload=b"", receipt=receipt, **said)


def encode_job(request: Request) -> bytes:
    """What comes before its payload, where a request travels with that."""
    content = encode_request(request)
    return _LENGTH.pack(len(content)) + content


def decode_job(content: bytes) -> Request:
    """What `encode_job` was given, with the payload that came after it."""
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    return replace(decode_request(content[_LENGTH.size : start]), payload=content[start:])


def encode_end(response: Response) -> bytes:
    """How a request ended, in a few words that can be lost without harm."""
    said = {
        "id": response.id,
        "status": response.status.value,
        "description": response.description[:_FEW_WORDS],
    }
    return json.dumps(said, separators=(",", ":")).encode()


def decode_end(content: bytes) -> Response:
    """What `encode_end` was given: its client has been told."""
    said = json.loads(content)
    return Response(said["id"], Status(said["status"]), said["description"], delivered=True)


def encode_update(request: Request, response: Response) -> bytes:
    """One update: what a client's wire needs of its request, the response, and what that carries."""
    said: dict[str, Any] = {
        "model": str(request.model),
        "generation": request.generation,
        "wire": request.wire.value,
        "session": request.session,
        "status": response.status.value,
        "description": response.description,
        "meta": None if response.meta is None else dict(response.meta),
    }
    body = b""
    match response.data:
        case bytes() as body:
            said["data"] = "bytes"
        case InlineResult(body, compressed):
            said |= {"data": "inline", "compressed": compressed}
        case StoredResult(url, size):
            said |= {"data": "stored", "url": url, "size": size}
    said["id"] = response.id
    head = json.dumps(said, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(head)), head, body))


def decode_update(content: bytes) -> tuple[Request, Response]:
    """What `encode_update` was given; of the request no more than that."""
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    said = json.loads(content[_LENGTH.size : start])
    request = Request(
        model=ModelKey.parse(said["model"]),
        generation=said["generation"],
        wire=Wire(said["wire"]),
        payload=b"",
        compress=False,
        base_url="",
        session=said["session"],
        id=said["id"],
    )
    data = _data(said, content[start:])
    status = Status(said["status"])
    return request, Response(said["id"], status, said["description"], data, said["meta"])


def _data(said: Mapping[str, Any], body: bytes) -> InlineResult | StoredResult | bytes | None:
    match said.get("data"):
        case "bytes":
            return body
        case "inline":
            return InlineResult(body, said["compressed"])
        case "stored":
            return StoredResult(said["url"], said["size"])
    return None
