"""Service: one request, from when a replica is idle for it until its last response is delivered."""

from __future__ import annotations

import asyncio
import logging

from ndif.host.port import Actor, EndedError, ReplicaLostError
from ndif.queue.attempts import Attempts
from ndif.queue.responder import Responder
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker, BrokerError, ClientLeftError

logger = logging.getLogger(__name__)

_LOOKS, _LOOK_S = 10, 0.5
_LOST = "The job ended, and what it came to was lost with its replica. Send it again."


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
            EndedError: if it was not run, as it has had its last response.
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
        except (ClientLeftError, EndedError, ReplicaLostError):
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
            elif request.session is None:
                # Its replica stored that, and may be lost before it has let go of the request.
                await self._broker.release(request)
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

    async def ended(self, request: Request) -> None:
        """Forget a request that has had its last response, which may not be the last that was kept."""
        self._attempts.forget(request.id)
        try:
            await self._responder.see_told(request, Response(request.id, Status.ERROR, _LOST))
        except Exception:
            logger.exception("request %s could not be told its end", request.id)

    async def has_left(self, request: Request) -> bool:
        """Whether its client, who was away when it was to run, stays away.

        A gateway that lost its connection has it again soon.
        """
        for _ in range(_LOOKS):
            if request.session is None or not await self._broker.absent([request.session]):
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    async def let_go(self, request: Request) -> None:
        """Forget a request for which nobody waits any more."""
        logger.info("request %s: its client left while it waited", request.id)
        await self.release(request)

    async def release(self, request: Request) -> None:
        """Forget a request."""
        self._attempts.forget(request.id)
        await self._broker.release(request)
