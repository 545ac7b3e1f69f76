"""Processor: the line of one model in one runtime (specification, section 4.2)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from enum import Enum

from ndif.cluster.controller import Controller, DeploymentError
from ndif.host.actor import ModelActor, ReplicaLostError
from ndif.queue.responder import Responder
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2


class ProcessorStatus(str, Enum):
    """What a processor is doing."""

    UNINITIALIZED = "UNINITIALIZED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    READY = "READY"
    BUSY = "BUSY"
    CANCELLED = "CANCELLED"


class Processor:
    """Runs requests in the order they came, each on whichever replica is ready."""

    def __init__(
        self,
        generation: str,
        controller: Controller,
        broker: Broker,
        responder: Responder,
        reply_freq_s: float,
    ) -> None:
        self.generation = generation
        self.status = ProcessorStatus.UNINITIALIZED
        self._controller = controller
        self._broker = broker
        self._responder = responder
        self._reply_freq_s = reply_freq_s
        self._line: deque[Request] = deque()
        self._arrived = asyncio.Event()
        self._attempts: Counter[str] = Counter()
        self._current: tuple[Request, ModelActor] | None = None

    async def enqueue(self, request: Request) -> None:
        """Put a request at the end of the line and tell its user the position."""
        self._line.append(request)
        await self._tell_position(request, len(self._line) + (self._current is not None))
        self._arrived.set()

    async def run(self) -> None:
        """Serve the line until cancelled."""
        replies = asyncio.create_task(self._reply_forever(), name="queue positions")
        try:
            while True:
                await self._arrived.wait()
                while self._line:
                    await self._serve_next()
                self._arrived.clear()
        finally:
            replies.cancel()
            self.status = ProcessorStatus.CANCELLED

    async def cancel(self, request_id: str, reason: str) -> bool:
        """End a request wherever it is; whether it was here."""
        for request in self._line:
            if request.id == request_id:
                self._line.remove(request)
                await self._finish(request, Response(request.id, Status.ERROR, reason))
                return True
        if self._current is not None and self._current[0].id == request_id:
            self._current[1].cancel(reason)
            return True
        return False

    async def _serve_next(self) -> None:
        try:
            replica = await self._ready_replica()
        except DeploymentError as error:
            logger.error("%s", error)  # noqa: TRY400 - the sentence is the message
            self.status = ProcessorStatus.UNINITIALIZED
            while self._line:
                request = self._line.popleft()
                await self._finish(request, Response(request.id, Status.ERROR, str(error)))
            return
        if not self._line:
            return  # who waited for it was cancelled meanwhile
        request = self._line.popleft()
        if request.session is not None and not self._broker.present(request.session):
            logger.info("request %s: its client left while it waited", request.id)
            await self._broker.release(request)
            return
        self.status = ProcessorStatus.BUSY
        self._current = (request, replica)
        try:
            await self._execute(request, replica)
        finally:
            self._current = None
            if self.status is ProcessorStatus.BUSY:
                self.status = ProcessorStatus.READY

    async def _ready_replica(self) -> ModelActor:
        if not self._controller.ready(self.generation):
            self.status = ProcessorStatus.PROVISIONING
            await self._tell_all(Status.PROVISIONING, "A replica is being set up for your model.")
            self.status = ProcessorStatus.DEPLOYING
            await self._tell_all(
                Status.DEPLOYING, f"The model is being loaded for nnsight {self.generation}."
            )
        replica = await self._controller.deploy(self.generation)
        self.status = ProcessorStatus.READY
        return replica

    async def _execute(self, request: Request, replica: ModelActor) -> None:
        async def respond(response: Response) -> None:
            await self._responder.respond(request, response)

        await respond(
            Response(request.id, Status.DISPATCHED, "Your job has been sent to a replica.")
        )
        leaving = None
        if request.session is not None:
            leaving = asyncio.create_task(self._cancel_when_gone(request.session, replica))
        try:
            response = await replica(request, respond)
        except ReplicaLostError as error:
            await self._retry(request, error)
            return
        except Exception:
            # A defect of ours must cost one request, not the line.
            logger.exception("request %s failed in its replica", request.id)
            response = Response(
                request.id,
                Status.ERROR,
                "The server failed while it ran this job; its log says why.",
            )
        finally:
            if leaving is not None:
                leaving.cancel()
        await self._finish(request, response)

    async def _cancel_when_gone(self, session: str, replica: ModelActor) -> None:
        """A job whose client has left would only hold up those who wait."""
        await self._broker.departed(session)
        replica.cancel("The client left.")

    async def _retry(self, request: Request, error: ReplicaLostError) -> None:
        """Give a request back to the head of the line, as often as it may be tried."""
        self.status = ProcessorStatus.UNINITIALIZED
        self._attempts[request.id] += 1
        if self._attempts[request.id] < _MAX_ATTEMPTS:
            logger.warning("request %s: %s; it is tried again", request.id, error)
            self._line.appendleft(request)
            return
        await self._finish(
            request,
            Response(
                request.id,
                Status.ERROR,
                f"The model's process was lost {_MAX_ATTEMPTS} times while it ran this job ({error}). "
                "It may need more memory than the server has.",
            ),
        )

    async def _finish(self, request: Request, response: Response) -> None:
        """Deliver the terminal response, then let go of the request: in this order nothing is lost."""
        await self._responder.respond(request, response)
        self._attempts.pop(request.id, None)
        await self._broker.release(request)

    async def _reply_forever(self) -> None:
        while True:
            await asyncio.sleep(self._reply_freq_s)
            ahead = self._current is not None
            for position, request in enumerate(list(self._line), start=1):
                await self._tell_position(request, position + ahead)

    async def _tell_position(self, request: Request, position: int) -> None:
        text = f"Your job is number {position} in the line for {request.model.repo_id}."
        await self._responder.respond(
            request,
            Response(request.id, Status.QUEUED, text),
            unless=lambda: request not in self._line,
        )

    async def _tell_all(self, status: Status, text: str) -> None:
        for request in list(self._line):
            await self._responder.respond(request, Response(request.id, status, text))
