"""Frames, read as a client reads them, as `Response` objects."""

from __future__ import annotations

import io
import json
import pickle

from ndif.schema.response import InlineResult, Response
from ndif.schema.status import Status


def read(frame: str | bytes) -> Response:
    """Return the response in a frame: a text frame's JSON, or the fourth pickle that `torch.save` wrote."""
    if isinstance(frame, str):
        content = json.loads(frame)
    else:
        file = io.BytesIO(frame)
        content = [pickle.load(file) for _ in range(4)][-1]
    data, status = content.get("data"), Status(content["status"])
    if status is Status.COMPLETED and isinstance(data, bytes):
        data = InlineResult(data, compressed=False)
    return Response(content["id"], status, content["description"], data, content.get("meta"))
