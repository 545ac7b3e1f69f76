"""A response in the form of the wire its request came by."""

from __future__ import annotations

from typing import Any

from ndif.schema import envelope_wire, headers_wire
from ndif.schema.request import Request, Wire
from ndif.schema.response import Response


def frame(request: Request, response: Response) -> str | bytes:
    """One message of the live channel that `request` waits on."""
    if request.wire is Wire.ENVELOPE:
        return envelope_wire.frame(response)
    return headers_wire.frame(response)


def fields(request: Request, response: Response) -> dict[str, Any]:
    """What `POST /request` and `GET /response/{id}` answer, as JSON."""
    if request.wire is Wire.ENVELOPE:
        return envelope_wire.fields(response)
    return headers_wire.fields(response)
