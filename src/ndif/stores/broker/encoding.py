"""Requests and updates as bytes that travel between processes of this server, and are never a pickle."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import lru_cache
from struct import Struct
from typing import Any

from ndif.schema import wires
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status

_LENGTH = Struct(">I")
_FEW_WORDS = 200
_UPDATE, _TEXT, _TERMINAL = 0x80, 1, 2
_PLAIN = tuple(f.name for f in fields(Request) if f.name not in {"payload", "model", "wire", "key"})
_KEY = "\0"
"""Separates the user from the key. Versions that know no key refuse unknown fields; to them all of it
is a user's opaque name.
"""

_text = json.JSONEncoder(separators=(",", ":")).encode
# Requests that were accepted name few models, each of them often.
_model = lru_cache(maxsize=128)(ModelKey.parse)


def encode_request(request: Request) -> bytes:
    """All of it but its payload."""
    said = {name: getattr(request, name) for name in _PLAIN}
    said |= {"model": str(request.model), "wire": request.wire.value, "env": dict(request.env)}
    if request.key:
        said["user"] = f"{request.user}{_KEY}{request.key}"
    return _text(said).encode()


def decode_request(content: bytes, **known: Any) -> Request:
    """What `encode_request` was given, but for what is `known` of it since."""
    said = json.loads(content.decode())
    said |= {"model": _model(said["model"]), "wire": Wire(said["wire"])}
    user, keyed, key = said["user"].rpartition(_KEY)
    if keyed:
        said |= {"user": user, "key": key}
    return Request(**{"payload": b"", **said, **known})


def encode_job(request: Request) -> bytes:
    """What comes before its payload, where a request travels with that."""
    content = encode_request(request)
    return _LENGTH.pack(len(content)) + content


def decode_job(content: bytes) -> Request:
    """What `encode_job` was given, with the payload that came after it."""
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    return decode_request(content[_LENGTH.size : start], payload=content[start:])


def encode_end(response: Response) -> bytes:
    """How a request ended, in a few words that can be lost without harm."""
    said = {
        "id": response.id,
        "status": response.status.value,
        "description": response.description[:_FEW_WORDS],
    }
    return _text(said).encode()


def encode_return(request_id: str) -> bytes:
    """That a request came to no end where it was sent."""
    return _text({"id": request_id}).encode()


def decode_end(content: bytes) -> tuple[str, Response | None]:
    """Which request, and what `encode_end` was given: its client has been told. Nothing if it came back."""
    said = json.loads(content.decode())
    request_id = said["id"]
    if "status" not in said:
        return request_id, None
    status = Status(said["status"])
    return request_id, Response(request_id, status, said["description"], delivered=True)


def encode_update(request: Request, response: Response) -> bytes:
    """One update: the frame that its client reads, after a byte that says what it is."""
    frame = wires.frame(request, response)
    kind = _UPDATE | (_TERMINAL if response.status.terminal else 0)
    if isinstance(frame, str):
        return bytes((kind | _TEXT,)) + frame.encode()
    return bytes((kind,)) + frame


def decode_update(content: bytes) -> tuple[str | bytes, bool]:
    """The frame, and whether it is its request's last.

    Raises:
        ValueError: if it is no update, or one of another version.
    """
    if not content or not content[0] & _UPDATE:
        raise ValueError(f"an update does not begin with {content[:1]!r}")
    kind, frame = content[0], content[1:]
    return frame.decode() if kind & _TEXT else frame, bool(kind & _TERMINAL)
