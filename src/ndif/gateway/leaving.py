"""What a gateway that stops says to its live clients, whose jobs end with their channels."""

from __future__ import annotations

from ndif.schema.response import Response
from ndif.schema.status import Status

_STOPPED = (
    "The server was stopped before this job was done. Send it again: another of its hosts answers, or "
    "this one once it is back."
)


def last_word(session: str) -> Response:
    """To whoever listens at `session`; of which request, a gateway does not know."""
    return Response(session, Status.ERROR, _STOPPED)
