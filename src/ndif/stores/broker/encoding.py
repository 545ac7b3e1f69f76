"""Requests and updates as bytes that travel between the processes of a server. None is a pickle."""

from __future__ import annotations

import json
from dataclasses import fields
from struct import Struct
from typing import Any

from ndif.schema import wires
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status

_LENGTH = Struct(">I")
_DESCRIPTION = 200
"""Characters of a description that `encode_end` keeps."""
_UPDATE, _TEXT, _TERMINAL = 0x80, 1, 2
_ELSEWHERE = {"payload", "model", "wire", "key", "attempts"}
_PLAIN = tuple(f.name for f in fields(Request) if f.name not in _ELSEWHERE)
_KEY = "\0"
"""Separates the user from the key, in one field: older versions refuse fields that they do not know, and
take both together for a user's opaque name.
"""

_text = json.JSONEncoder(separators=(",", ":")).encode


def encode_request(request: Request) -> bytes:
    """Encode a request without its payload."""
    record = {name: getattr(request, name) for name in _PLAIN}
    record |= {"model": str(request.model), "wire": request.wire.value, "env": dict(request.env)}
    if request.key:
        record["user"] = f"{request.user}{_KEY}{request.key}"
    return _text(record).encode()


def decode_request(content: bytes, **known: Any) -> Request:
    """Decode what `encode_request` returned; `known` replaces or adds fields."""
    record = json.loads(content.decode())
    record |= {"model": ModelKey.parse(record["model"]), "wire": Wire(record["wire"])}
    user, keyed, key = record["user"].rpartition(_KEY)
    if keyed:
        record |= {"user": user, "key": key}
    return Request(**{"payload": b"", **record, **known})


def encode_job(request: Request) -> bytes:
    """Encode a request so that its payload may be appended."""
    content = encode_request(request)
    return _LENGTH.pack(len(content)) + content


def decode_job(content: bytes) -> Request:
    """Decode what `encode_job` returned, with the payload that was appended."""
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    return decode_request(content[_LENGTH.size : start], payload=content[start:])


def encode_end(response: Response) -> bytes:
    """Encode the terminal response of a request, with a shortened description."""
    record = {
        "id": response.id,
        "status": response.status.value,
        "description": response.description[:_DESCRIPTION],
    }
    return _text(record).encode()


def encode_return(request_id: str) -> bytes:
    """Encode the news that a request did not end at the replica to which it was sent."""
    return _text({"id": request_id}).encode()


def decode_end(content: bytes) -> tuple[str, Response | None]:
    """Decode a request's id and its terminal response, which its client has; None if it was returned."""
    record = json.loads(content.decode())
    request_id = record["id"]
    if "status" not in record:
        return request_id, None
    status = Status(record["status"])
    return request_id, Response(request_id, status, record["description"], delivered=True)


def encode_update(request: Request, response: Response) -> bytes:
    """Encode an update: a byte that says its kind, and then the frame that the client reads."""
    frame = wires.frame(request, response)
    kind = _UPDATE | (_TERMINAL if response.status.terminal else 0)
    if isinstance(frame, str):
        return bytes((kind | _TEXT,)) + frame.encode()
    return bytes((kind,)) + frame


def decode_update(content: bytes) -> tuple[str | bytes, bool]:
    """Decode an update into its frame and True if it is terminal."""
    if not content or not content[0] & _UPDATE:
        raise ValueError(f"an update does not begin with {content[:1]!r}")
    kind, frame = content[0], content[1:]
    return frame.decode() if kind & _TEXT else frame, bool(kind & _TERMINAL)
