"""How nnsight 0.6 and 0.7 read a response: a `torch.save`d mapping on Socket.IO, JSON over HTTP.

Source: `nnsight.schema.response` and `RemoteBackend.handle_response` of nnsight 0.6.3 and 0.7.0.
"""

from __future__ import annotations

from typing import Any

from ndif.schema import torch_format
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status

# These generations know neither; both are a way of waiting.
_WAITING = {Status.PROVISIONING, Status.DEPLOYING}


def fields(response: Response) -> dict[str, Any]:
    """The response as the mapping that these generations validate."""
    status = Status.QUEUED if response.status in _WAITING else response.status
    out: dict[str, Any] = {
        "id": response.id,
        "status": status.value,
        "description": response.description,
    }
    if isinstance(response.data, StoredResult):
        out["data"] = (response.data.url, response.data.size)
    elif isinstance(response.data, bytes):
        out["data"] = response.data
    return out


def frame(response: Response) -> bytes:
    """The payload of one `blocking_response` event.

    Raises:
        ValueError: for a compressed inline result, which these clients would not unpack.
    """
    if isinstance(response.data, InlineResult):
        if response.data.compressed:
            raise ValueError("an inline result of this wire must not be compressed")
        return torch_format.dumps_with(fields(response), "data", response.data.content, load=True)
    return torch_format.dumps(fields(response))
