"""Service: one request, from when a replica is idle for it until its last response is delivered."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ndif.host.port import Actor, ReplicaLostError
from ndif.queue.attempts import Attempts
from ndif.queue.responder import Responder
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker, BrokerError, ClientLeftError
from ndif.tasks import within

logger = logging.getLogger(__name__)

_BACK_WITHIN_S = 5.0


class Service:
    """What is done for every request, whatever its line."""

    def __init__(self, broker: Broker, responder: Responder, attempts: Attempts) -> None:
        self._broker = broker
        self._responder = responder
        self._attempts = attempts

    async def run(self, request: Request, actor: Actor) -> Response:
        """Its last response.

        Raises:
            ClientLeftError: if it was not run, as nobody waits for it.
            ReplicaLostError: if it has none, and may have one elsewhere.
        """

        async def respond(response: Response) -> bool:
            return await self._responder.respond(request, response)

        leaving = None
        if request.session is not None:
            leaving = asyncio.create_task(self._cancel_when_gone(request.session, actor))
        try:
            reason = self._attempts.cancelled(request.id)  # since it was taken
            if reason is not None:
                return Response(request.id, Status.ERROR, reason)
            return await actor(request, respond)
        except (ClientLeftError, ReplicaLostError):
            raise
        except Exception:
            # A defect of ours must cost one request, not the line.
            logger.exception("request %s failed in its replica", request.id)
            return Response(
                request.id,
                Status.ERROR,
                "The server failed while it ran this job; its log says why.",
            )
        finally:
            if leaving is not None:
                leaving.cancel()

    async def _cancel_when_gone(self, session: str, actor: Actor) -> None:
        """A job whose client has left would only hold up those who wait."""
        await self._broker.departed(session)
        actor.cancel("The client left.")

    async def finish(self, request: Request, response: Response) -> None:
        """Deliver the terminal response, with which the request is let go of."""
        self._attempts.forget(request.id)
        try:
            if not response.delivered:
                await self._responder.respond(request, response)
        except Exception:
            # A store that fails must cost this answer and no more.
            logger.exception("request %s could not be told its end", request.id)
            await self._broker.release(request)

    async def has_ended(self, request: Request) -> bool:
        """Whether its user has been told how it ended; where that cannot be known it is not so."""
        try:
            return await self._broker.has_ended(request)
        except BrokerError as error:
            logger.warning("request %s: %s", request.id, error)
            return False

    async def has_left(self, request: Request) -> bool:
        """Whether its client is away for good who was so when it was to run.

        A gateway that lost its connection has it again soon.
        """
        if request.session is None:
            return False
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._broker.departed(request.session), _BACK_WITHIN_S)
            return True
        return False

    async def let_go(self, request: Request) -> None:
        """Forget a request for which nobody waits any more."""
        logger.info("request %s: its client left while it waited", request.id)
        await self.release(request)

    async def release(self, request: Request) -> None:
        """Forget a request."""
        self._attempts.forget(request.id)
        await self._broker.release(request)
