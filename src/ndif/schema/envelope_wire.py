"""How nnsight 0.8 reads a response: JSON, or one binary frame with the result inside.

Source: `nnsight.schema.response` and `RemoteBackend.parse` of nnsight 0.8.
"""

from __future__ import annotations

import json
from typing import Any

from ndif.schema import torch_format
from ndif.schema.response import InlineResult, Response, StoredResult


def fields(response: Response) -> dict[str, Any]:
    """The response as the JSON object that this generation validates."""
    out: dict[str, Any] = {
        "id": response.id,
        "status": response.status.value,
        "description": response.description,
    }
    if isinstance(response.data, StoredResult):
        out["data"] = response.data.url
    if response.meta is not None:
        out["meta"] = dict(response.meta)
    return out


def frame(response: Response) -> str | bytes:
    """One WebSocket frame: text, or binary where a result rides along."""
    if isinstance(response.data, InlineResult):
        return torch_format.dumps_with(fields(response), "data", response.data.content, load=False)
    return json.dumps(fields(response))
