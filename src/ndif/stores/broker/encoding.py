"""Encodings of requests and updates, without pickle, for transport between a server's processes."""

from __future__ import annotations

import json
import uuid
from dataclasses import fields
from struct import Struct
from typing import Any, NamedTuple

import msgspec

from ndif.runtime.typed_json import from_json, to_json
from ndif.schema import wires
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.step import Step, steps_from

_NUMBER = Struct(">Q")
_DESCRIPTION = 200
"""Maximum characters of a description that `encode_end` keeps."""
_PLAIN = tuple(
    f.name for f in fields(Request) if f.name not in {"payload", "model", "wire", "env", "refusal"}
)
_UPDATE, _TEXT, _TERMINAL = 0x80, 1, 2
_PREFIX = 2
_SUBMITTED, _QUESTION = b"\0", b"\1"


def encode_request(request: Request, digest: str = "") -> bytes:
    """Encode a request without its payload, but with the payload's digest if Redis stores it."""
    record = {name: getattr(request, name) for name in _PLAIN}
    record |= {"model": str(request.model), "wire": request.wire.value, "env": dict(request.env)}
    if digest:
        record["digest"] = digest
    return to_json(record)


def decode_request(content: bytes, **overrides: Any) -> Request:
    """Decode a message of `encode_request`; `overrides` replaces or adds fields."""
    record = json.loads(content.decode())
    record |= {"model": ModelKey.parse(record["model"]), "wire": Wire(record["wire"])}
    return Request(**{"payload": b"", **record, **overrides})


def claimed_fields(content: bytes) -> Request:
    """Return the unverified fields of a request that will not run, which its error response needs.

    Raise a ValueError, KeyError, TypeError or AttributeError if any is missing or malformed.
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
    """Encode a message with its number in a sequence, so that a repeated message can be refused."""
    return _NUMBER.pack(number) + content


def decode_numbered(content: bytes) -> tuple[int, bytes]:
    """Decode a message of `encode_numbered`; raise a ValueError if the message is too short."""
    if len(content) < _NUMBER.size:
        raise ValueError("a message has no number")
    (number,) = _NUMBER.unpack_from(content)
    return number, content[_NUMBER.size :]


class _End(msgspec.Struct, omit_defaults=True):
    """The end of a request; without a status, the replica gave the request back."""

    id: str
    status: Status | None = None
    description: str = ""
    execution_time: float | None = None
    """Seconds of the run; None if the request did not run."""
    peak_memory: int | None = None
    result_bytes: int = 0
    limit: str = ""
    steps: tuple[Step, ...] = ()


def encode_end(response: Response) -> bytes:
    """Encode the terminal response of a request, with a shortened description."""
    end = _End(
        response.id,
        response.status,
        response.description[:_DESCRIPTION],
        limit=response.limit,
        steps=response.steps,
    )
    if response.meta is not None:
        end.execution_time, end.peak_memory = response.execution_s, response.peak_memory
        end.result_bytes = response.result_bytes
    return to_json(end)


def encode_return(request_id: str) -> bytes:
    """Encode the message by which a replica gives back a request that did not end there."""
    return to_json(_End(request_id))


def decode_end(content: bytes) -> tuple[str, Response | None]:
    """Decode a request's id and its delivered terminal response, None if the replica gave it back."""
    end = from_json(_End, content)
    if end.status is None:
        return end.id, None
    ran = end.execution_time is not None
    response = Response(
        end.id,
        end.status,
        end.description,
        meta={"execution_time": end.execution_time, "peak_memory": end.peak_memory}
        if ran
        else None,
        result_bytes=end.result_bytes,
        delivered=True,
        limit=end.limit,
        steps=steps_from(end.steps),
    )
    return end.id, response


class Update(NamedTuple):
    """An update, decoded."""

    request_id: str
    frame: str | bytes
    """The message that the client reads."""
    is_terminal: bool


def encode_update(request: Request, response: Response) -> bytes:
    """Encode an update: a byte for its kind, the request's id with its length, and the client's frame."""
    frame = wires.frame(request, response)
    kind = _UPDATE | (_TERMINAL if response.status.terminal else 0)
    if isinstance(frame, str):
        kind, frame = kind | _TEXT, frame.encode()
    request_id = request.id.encode()
    return bytes((kind, len(request_id))) + request_id + frame


def decode_update(content: bytes) -> Update:
    """Decode a message of `encode_update`; raise a ValueError for any other message."""
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
    """Encode the message that a request was submitted, with the update that ends it if it is lost."""
    return _SUBMITTED + encode_update(request, end)


def decode_submission(content: bytes) -> bytes | None:
    """Return the update in a message of `encode_submission`; None for any other message."""
    return content[len(_SUBMITTED) :] if content.startswith(_SUBMITTED) else None


def encode_question(request_id: str, answers: str) -> bytes:
    """Encode the question whether a client waits for a request, and the channel for the answer."""
    return _QUESTION + to_json({"id": request_id, "answers": answers})


def decode_question(content: bytes) -> tuple[str, str] | None:
    """Return the id and the channel in a message of `encode_question`; None for any other message."""
    if not content.startswith(_QUESTION):
        return None
    record = json.loads(content[len(_QUESTION) :])
    return record["id"], record["answers"]
