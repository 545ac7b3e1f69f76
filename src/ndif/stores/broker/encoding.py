"""Requests and updates as bytes that travel between the processes of a server. None is a pickle."""

from __future__ import annotations

import json
import uuid
from dataclasses import fields
from struct import Struct
from typing import Any, NamedTuple

from ndif.schema import wires
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.step import steps_from

_NUMBER = Struct(">Q")
_DESCRIPTION = 200
"""Characters of a description that `encode_end` keeps."""
_PLAIN = tuple(
    f.name for f in fields(Request) if f.name not in {"payload", "model", "wire", "env", "refusal"}
)
_UPDATE, _TEXT, _TERMINAL = 0x80, 1, 2
_PREFIX = 2
_SUBMITTED, _QUESTION = b"\0", b"\1"

_text = json.JSONEncoder(separators=(",", ":")).encode


def encode_request(request: Request, digest: str = "") -> bytes:
    """Encode a request without its payload, but with the digest of one that Redis has."""
    record = {name: getattr(request, name) for name in _PLAIN}
    record |= {"model": str(request.model), "wire": request.wire.value, "env": dict(request.env)}
    if digest:
        record["digest"] = digest
    return _text(record).encode()


def decode_request(content: bytes, **known: Any) -> Request:
    """Decode what `encode_request` returned; `known` replaces or adds fields."""
    record = json.loads(content.decode())
    record |= {"model": ModelKey.parse(record["model"]), "wire": Wire(record["wire"])}
    return Request(**{"payload": b"", **record, **known})


def claimed_fields(content: bytes) -> Request:
    """Return what a request that will not run says of itself and its end needs: its id, wire and client.

    Nobody of this server signed it. Raise a ValueError, KeyError, TypeError or
    AttributeError if it says less.
    """
    record = json.loads(content.decode())
    subscription_id = record.get("subscription_id")
    return Request(
        model=ModelKey.parse(record["model"]),
        generation=str(record["generation"]),
        wire=Wire(record["wire"]),
        payload=b"",
        compress=False,
        base_url="",
        subscription_id=None if subscription_id is None else str(subscription_id),
        id=str(uuid.UUID(record["id"])),
    )


def encode_numbered(number: int, content: bytes) -> bytes:
    """Encode a message with its place in a sequence, so that no message counts twice."""
    return _NUMBER.pack(number) + content


def decode_numbered(content: bytes) -> tuple[int, bytes]:
    """Decode what `encode_numbered` returned; raise a ValueError if it is shorter."""
    if len(content) < _NUMBER.size:
        raise ValueError("a message has no number")
    (number,) = _NUMBER.unpack_from(content)
    return number, content[_NUMBER.size :]


_META = ("execution_time", "peak_memory")


def encode_end(response: Response) -> bytes:
    """Encode the terminal response of a request, with a shortened description."""
    record: dict[str, Any] = {
        "id": response.id,
        "status": response.status.value,
        "description": response.description[:_DESCRIPTION],
    }
    if response.meta is not None:
        record |= {
            "execution_time": response.execution_s,
            "peak_memory": response.peak_memory,
            "result_bytes": response.result_bytes,
        }
    if response.limit:
        record["limit"] = response.limit
    if response.steps:
        record["steps"] = response.steps
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
    end = Response(
        request_id,
        Status(record["status"]),
        record["description"],
        # One that did not run has none.
        meta={name: record[name] for name in _META if name in record} or None,
        result_bytes=record.get("result_bytes", 0),
        delivered=True,
        limit=record.get("limit", ""),
        steps=steps_from(record.get("steps", ())),
    )
    return request_id, end


class Update(NamedTuple):
    """An update, decoded."""

    request_id: str
    frame: str | bytes
    """The message that the client reads."""
    is_terminal: bool


def encode_update(request: Request, response: Response) -> bytes:
    """Encode an update: a byte that says its kind, the request's id, and the frame of the client."""
    frame = wires.frame(request, response)
    kind = _UPDATE | (_TERMINAL if response.status.terminal else 0)
    if isinstance(frame, str):
        kind, frame = kind | _TEXT, frame.encode()
    request_id = request.id.encode()
    return bytes((kind, len(request_id))) + request_id + frame


def decode_update(content: bytes) -> Update:
    """Decode what `encode_update` returned."""
    if len(content) < _PREFIX or not content[0] & _UPDATE:
        raise ValueError(f"an update does not begin with {content[:1]!r}")
    kind, end = content[0], _PREFIX + content[1]
    frame = content[end:]
    return Update(
        content[_PREFIX:end].decode(),
        frame.decode() if kind & _TEXT else frame,
        bool(kind & _TERMINAL),
    )


def encode_submission(request: Request, end: Response) -> bytes:
    """Encode the news that a request was submitted, with the update that ends it should it be lost."""
    return _SUBMITTED + encode_update(request, end)


def decode_submission(content: bytes) -> bytes | None:
    """Return the update in what `encode_submission` returned; None for anything else."""
    return content[len(_SUBMITTED) :] if content.startswith(_SUBMITTED) else None


def encode_question(request_id: str, answers: str) -> bytes:
    """Encode the question of whether a client waits for a request, and the channel for the answer."""
    return _QUESTION + _text({"id": request_id, "answers": answers}).encode()


def decode_question(content: bytes) -> tuple[str, str] | None:
    """Return the id and the channel in what `encode_question` returned; None for anything else."""
    if not content.startswith(_QUESTION):
        return None
    record = json.loads(content[len(_QUESTION) :])
    return record["id"], record["answers"]
