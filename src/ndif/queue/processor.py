"""Processor: the line of one model in one runtime (specification, section 4.2)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum

from ndif.cluster.controller import Controller, DeploymentError
from ndif.host.actor import ModelActor, ReplicaLostError
from ndif.queue.estimates import RunTimes, describe_wait
from ndif.queue.line import Entry, Line
from ndif.queue.responder import Responder
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker

logger = logging.getLogger(__name__)


class ProcessorStatus(str, Enum):
    """What a processor is doing."""

    UNINITIALIZED = "UNINITIALIZED"
    PROVISIONING = "PROVISIONING"
    DEPLOYING = "DEPLOYING"
    READY = "READY"
    BUSY = "BUSY"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class _Run:
    """What a replica is running."""

    entry: Entry[Request]
    replica: ModelActor
    since: float
    """Monotonic seconds."""


class Processor:
    """Has the users of a model take turns, each request on whichever replica is ready."""

    def __init__(
        self,
        generation: str,
        controller: Controller,
        broker: Broker,
        responder: Responder,
        reply_freq_s: float,
        max_attempts: int,
    ) -> None:
        self.generation = generation
        self.status = ProcessorStatus.UNINITIALIZED
        self._controller = controller
        self._broker = broker
        self._responder = responder
        self._reply_freq_s = reply_freq_s
        self._max_attempts = max_attempts
        self._line: Line[Request] = Line()
        self._run_times = RunTimes()
        self._arrived = asyncio.Event()
        self._attempts: Counter[str] = Counter()
        self._current: _Run | None = None

    async def enqueue(self, request: Request) -> None:
        """Put a request in line and tell its user the position."""
        entry = Entry(request.id, request.user, request, request.received)
        entry = replace(entry, cost=self._run_times.expected(entry))
        self._line.add(entry)
        position = self._line.position(request.id)
        if position is not None:  # else the next of the regular updates says it
            await self._tell_position(entry, position)
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
        waiting = self._line.remove(request_id)
        if waiting is not None:
            await self._finish(waiting.what, Response(request_id, Status.ERROR, reason))
            return True
        if self._current is not None and self._current.entry.id == request_id:
            self._current.replica.cancel(reason)
            return True
        return False

    async def _serve_next(self) -> None:
        try:
            replica = await self._ready_replica()
        except DeploymentError as error:
            logger.error("%s", error)  # noqa: TRY400 - the sentence is the message
            self.status = ProcessorStatus.UNINITIALIZED
            for waiting in self._line.remove_all(lambda _: True):
                await self._finish(waiting.what, Response(waiting.id, Status.ERROR, str(error)))
            return
        entry = self._line.take()
        if entry is None:
            return  # who waited for it was cancelled meanwhile
        request = entry.what
        if request.session is not None and not self._broker.present(request.session):
            logger.info("request %s: its client left while it waited", request.id)
            await self._broker.release(request)
            return
        self.status = ProcessorStatus.BUSY
        self._current = _Run(entry, replica, time.monotonic())
        try:
            await self._execute(self._current)
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

    async def _execute(self, run: _Run) -> None:
        request, replica = run.entry.what, run.replica

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
            await self._retry(run.entry, error)
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
        ran_s = time.monotonic() - run.since
        self._run_times.measured(run.entry, ran_s)
        self._line.settle(run.entry, ran_s)
        await self._finish(request, response)

    async def _cancel_when_gone(self, session: str, replica: ModelActor) -> None:
        """A job whose client has left would only hold up those who wait."""
        await self._broker.departed(session)
        replica.cancel("The client left.")

    async def _retry(self, entry: Entry[Request], error: ReplicaLostError) -> None:
        """Give a request back to the head of the line, as often as it may be tried."""
        self.status = ProcessorStatus.UNINITIALIZED
        self._attempts[entry.id] += 1
        if self._attempts[entry.id] < self._max_attempts:
            logger.warning("request %s: %s; it is tried again", entry.id, error)
            self._line.give_back(entry)
            return
        times = "once" if self._max_attempts == 1 else f"{self._max_attempts} times"
        await self._finish(
            entry.what,
            Response(
                entry.id,
                Status.ERROR,
                f"The model's process was lost {times} while it ran this job ({error}). "
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
            work_ahead_s = 0.0
            for entry, position in self._line.positions():
                await self._tell_position(entry, position, work_ahead_s)
                work_ahead_s += self._run_times.expected(entry)

    async def _tell_position(
        self, entry: Entry[Request], position: int, work_ahead_s: float | None = None
    ) -> None:
        running = [self._current.since] if self._current is not None else []
        text = (
            f"Your job is number {position + len(running)} in the line for "
            f"{entry.what.model.repo_id}."
        )
        replicas = int(self._controller.ready(self.generation))
        wait = self._run_times.wait(position, replicas, running, time.monotonic(), work_ahead_s)
        if wait is not None:
            text += f" By what jobs took lately it starts in {describe_wait(wait.seconds)}."
        await self._responder.respond(
            entry.what,
            Response(entry.id, Status.QUEUED, text),
            unless=lambda: entry.id not in self._line,
        )

    async def _tell_all(self, status: Status, text: str) -> None:
        for entry in list(self._line):
            await self._responder.respond(entry.what, Response(entry.id, status, text))
