"""Responses in the form that the clients of each wire read."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, GetPydanticSchema, with_config
from typing_extensions import NotRequired, TypedDict

from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status

JOB_ID = "0d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21"
"""Id of the job in examples."""


@with_config(
    ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {"id": JOB_ID, "status": "RECEIVED", "description": "Your job has been received."}
            ]
        },
    )
)
class JobUpdate(TypedDict):
    """A job's state."""

    id: str
    """The job's id."""
    # The value of the enum, as in JSON and pickles.
    status: Annotated[str, GetPydanticSchema(lambda _, handler: handler(Status))]
    description: str
    """A sentence about the state, such as the position in the queue, or the error of a failed job."""
    data: NotRequired[str | tuple[str, int] | None]
    """With COMPLETED, the signed address of the result, which expires; for clients of 0.6 and 0.7
    followed by its size in bytes."""
    meta: NotRequired[dict[str, Any] | None]
    """With COMPLETED, the cost of the run: `execution_time` in seconds, `peak_memory` in bytes."""


def _update(response: Response, status: Status) -> JobUpdate:
    return {"id": response.id, "status": status.value, "description": response.description}


def envelope_fields(response: Response) -> JobUpdate:
    """Return the JSON object that nnsight 0.8 validates."""
    out = _update(response, response.status)
    if isinstance(response.data, StoredResult):
        out["data"] = response.data.url
    if response.meta is not None:
        out["meta"] = dict(response.meta)
    return out


def envelope_frame(response: Response) -> str | bytes:
    """Return one WebSocket frame: text, or binary if it carries a result."""
    if isinstance(response.data, InlineResult):
        return torch_bytes_with(
            envelope_fields(response), "data", response.data.content, load=False
        )
    return json.dumps(envelope_fields(response))


def header_fields(response: Response) -> JobUpdate:
    """Return the mapping that nnsight 0.6 and 0.7 validate."""
    out = _update(response, response.status.on_header_wire)
    if isinstance(response.data, StoredResult):
        out["data"] = (response.data.url, response.data.size)
    return out


def header_frame(response: Response) -> bytes:
    """Return the payload of one `blocking_response` event; raise a ValueError for a compressed result."""
    if isinstance(response.data, InlineResult):
        if response.data.compressed:
            raise ValueError("an inline result of this wire must not be compressed")
        return torch_bytes_with(header_fields(response), "data", response.data.content, load=True)
    streamed = {"data": response.data} if isinstance(response.data, bytes) else {}
    return torch_bytes({**header_fields(response), **streamed})


_MAX_JOINED = 16 << 10
"""Maximum size, in bytes, of a LOG frame to which another is joined: each join copies the frame."""
_HEADER_TEXTS = 6
"""Number of texts at the beginning of a `header_fields` mapping: three names, each with its value."""


def join_header_frames(first: bytes, second: bytes) -> bytes | None:
    """Return one frame that replaces two consecutive ones of `header_frame`; None if a client needs both.

    LOG frames are joined, and a terminal status replaces the status before it.
    """
    (of, status, text), (also_of, next_status, next_text) = map(_read_header, (first, second))
    if of != also_of or status is Status.STREAM or status.terminal:
        return None
    if status is Status.LOG:
        if next_status is not Status.LOG or len(first) > _MAX_JOINED:
            return None
        return header_frame(Response(of, Status.LOG, f"{text}\n{next_text}"))
    return second if next_status.terminal else None


def _read_header(frame: bytes) -> tuple[str, Status, str]:
    """Return the id, the status and the description in a frame of `header_frame`."""
    file = io.BytesIO(frame)
    file.seek(len(_HEAD))
    texts: list[str] = []
    memo: dict[object, str] = {}
    # `genops` lists the pickle's instructions without executing them.
    for code, value, _ in pickletools.genops(file):
        if code.name == "BINUNICODE":
            texts.append(str(value))
        elif code.name == "BINGET":
            texts.append(memo[value])
        elif code.name == "BINPUT" and texts:
            memo[value] = texts[-1]
        if len(texts) == _HEADER_TEXTS:
            break
    _, request_id, _, status, _, description = texts
    return request_id, Status(status), description


def frame(request: Request, response: Response) -> str | bytes:
    """Return one message for the subscription on which the request's client waits."""
    if request.wire is Wire.ENVELOPE:
        return envelope_frame(response)
    return header_frame(response)


def fields(request: Request, response: Response) -> JobUpdate:
    """Return the JSON object with which `POST /request` and `GET /response/{id}` answer."""
    if request.wire is Wire.ENVELOPE:
        return envelope_fields(response)
    return header_fields(response)


# The format of `torch.save`, written without torch. Its first version, which every torch still reads, is
# five pickles in a row: a magic number, a protocol version, the writer's word sizes, the object, and the
# keys of the tensor storages that follow. The control plane writes no tensors, so the last one is empty.

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_SYSTEM = {
    "protocol_version": _PROTOCOL,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}
_HEAD = b"".join(pickle.dumps(part, 2) for part in (_MAGIC, _PROTOCOL, _SYSTEM))
_TAIL = pickle.dumps([], 2)
# `torch.storage._load_from_bytes(content)` is how torch itself embeds one saved object in another.
_LOAD = b"ctorch.storage\n_load_from_bytes\n"


def torch_bytes(fields: Mapping[str, object]) -> bytes:
    """Return a mapping of plain values as bytes that `torch.load` reads."""
    return b"".join((_HEAD, pickle.dumps(dict(fields), 2), _TAIL))


def torch_bytes_with(
    fields: Mapping[str, object], name: str, content: bytes, *, load: bool
) -> bytes:
    """Return `fields` and an entry `name` that holds `content`, as bytes that `torch.load` reads.

    `content` is copied once, into the result, and never parsed. With `load`, `torch.load` loads the content
    too, as bytes of `torch.save`.
    """
    opened, key = pickle.dumps(dict(fields), 2)[:-1], pickle.dumps(name, 2)[2:-1]
    size = pickle.BINBYTES8 + struct.pack("<Q", len(content))
    before = _HEAD + opened + key + (_LOAD if load else b"") + size
    call = (pickle.TUPLE1 + pickle.REDUCE) if load else b""
    return b"".join((before, content, call, pickle.SETITEM, pickle.STOP, _TAIL))
