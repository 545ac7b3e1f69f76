"""The announcement: what the client of a request is told when that goes to a replica (section 8.2)."""

from __future__ import annotations

import logging

from ndif.host.port import Respond
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import BrokerError, ClientLeftError

logger = logging.getLogger(__name__)


def announcement(request: Request) -> Response:
    """What it is told."""
    return Response(request.id, Status.DISPATCHED, "Your job has been sent to a replica.")


async def announce(request: Request, respond: Respond) -> None:
    """Tell it.

    Raises:
        ClientLeftError: if it is there no longer.
    """
    try:
        heard = await respond(announcement(request))
    except BrokerError as error:
        # Then it runs unannounced: of a broker that is away nothing is known.
        logger.warning("request %s: %s", request.id, error)
        return
    if not heard:
        raise ClientLeftError
