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
        said = json.loads(frame)
    else:
        file = io.BytesIO(frame)
        said = [pickle.load(file) for _ in range(4)][-1]
    data, status = said.get("data"), Status(said["status"])
    if status is Status.COMPLETED and isinstance(data, bytes):
        data = InlineResult(data, compressed=False)
    return Response(said["id"], status, said["description"], data, said.get("meta"))
