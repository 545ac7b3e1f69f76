"""Processor: the line of one model in one runtime (specification, section 4.2)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace

from ndif.cluster.controller import Controller, DeploymentError
from ndif.host.actor import ModelActor, ReplicaLostError
from ndif.queue.estimates import RunTimes, describe_wait
from ndif.queue.line import Entry, Line
from ndif.queue.replicas import ProcessorStatus, Replica, Replicas, Run
from ndif.queue.responder import Responder
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.stores.broker import Broker

logger = logging.getLogger(__name__)

_BACK_OFF_S = 30.0
"""How long a replica that could not be started is left alone while others serve."""


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
        self._controller = controller
        self._broker = broker
        self._responder = responder
        self._reply_freq_s = reply_freq_s
        self._max_attempts = max_attempts
        self._line: Line[Request] = Line()
        self._run_times = RunTimes()
        self._arrived = asyncio.Event()
        self._attempts: Counter[str] = Counter()
        self._replicas = Replicas(controller.replica_ids(generation))
        self._ended = False

    @property
    def status(self) -> ProcessorStatus:
        """What it is doing."""
        return ProcessorStatus.CANCELLED if self._ended else self._replicas.status

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
            await asyncio.gather(*(self._work(replica) for replica in self._replicas))
        finally:
            replies.cancel()
            self._ended = True

    async def cancel(self, request_id: str, reason: str) -> bool:
        """End a request wherever it is; whether it was here."""
        waiting = self._line.remove(request_id)
        if waiting is not None:
            await self._finish(waiting.what, Response(request_id, Status.ERROR, reason))
            return True
        for run in self._replicas.runs:
            if run.entry.id == request_id:
                run.actor.cancel(reason)
                return True
        return False

    async def _work(self, replica: Replica) -> None:
        """Serve the line with one replica: whichever is idle first takes what is next."""
        while True:
            if not self._line:
                # A replica that finds nothing tells the line so: nobody waits for what others have had.
                self._line.take()
                self._arrived.clear()
            await self._arrived.wait()
            actor = await self._ready(replica) if self._line else None
            entry = self._line.take() if actor is not None else None
            # Who waited for the replica may have been cancelled, or served by another, meanwhile.
            if actor is not None and entry is not None:
                await self._serve(replica, actor, entry)

    async def _ready(self, replica: Replica) -> ModelActor | None:
        """What runs requests on `replica`, started if it does not run; None if it cannot be."""
        others = self._replicas.others(replica)
        try:
            if not self._controller.ready(self.generation, replica.id):
                replica.failed = False
                alone = not any(other.serving or other.coming for other in others)
                replica.status = ProcessorStatus.PROVISIONING
                if alone:
                    text = "A replica is being set up for your model."
                    await self._tell_all(Status.PROVISIONING, text)
                replica.status = ProcessorStatus.DEPLOYING
                if alone:
                    text = f"The model is being loaded for nnsight {self.generation}."
                    await self._tell_all(Status.DEPLOYING, text)
            actor = await self._controller.deploy(self.generation, replica.id)
        except DeploymentError as error:
            logger.error("%s", error)  # noqa: TRY400 - the sentence is the message
            replica.status, replica.failed = ProcessorStatus.UNINITIALIZED, True
            if not all(other.failed for other in others):
                await asyncio.sleep(_BACK_OFF_S)
                replica.failed = False
                return None
            for waiting in self._line.remove_all(lambda _: True):
                await self._finish(waiting.what, Response(waiting.id, Status.ERROR, str(error)))
            return None
        replica.status, replica.failed = ProcessorStatus.READY, False
        return actor

    async def _serve(self, replica: Replica, actor: ModelActor, entry: Entry[Request]) -> None:
        request = entry.what
        if request.session is not None and not self._broker.present(request.session):
            logger.info("request %s: its client left while it waited", request.id)
            await self._broker.release(request)
            return
        replica.status = ProcessorStatus.BUSY
        replica.run = Run(entry, actor, time.monotonic())
        try:
            await self._execute(replica.run)
            replica.status = ProcessorStatus.READY
        except ReplicaLostError as error:
            replica.status = ProcessorStatus.UNINITIALIZED
            await self._retry(entry, error)
        finally:
            replica.run = None

    async def _execute(self, run: Run) -> None:
        request, actor = run.entry.what, run.actor

        async def respond(response: Response) -> None:
            await self._responder.respond(request, response)

        await respond(
            Response(request.id, Status.DISPATCHED, "Your job has been sent to a replica.")
        )
        leaving = None
        if request.session is not None:
            leaving = asyncio.create_task(self._cancel_when_gone(request.session, actor))
        try:
            response = await actor(request, respond)
        except ReplicaLostError:
            raise
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

    async def _cancel_when_gone(self, session: str, actor: ModelActor) -> None:
        """A job whose client has left would only hold up those who wait."""
        await self._broker.departed(session)
        actor.cancel("The client left.")

    async def _retry(self, entry: Entry[Request], error: ReplicaLostError) -> None:
        """Give a request back to the head of the line, as often as it may be tried."""
        self._attempts[entry.id] += 1
        if self._attempts[entry.id] < self._max_attempts:
            logger.warning("request %s: %s; it is tried again", entry.id, error)
            self._line.give_back(entry)
            self._arrived.set()
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
        running = [run.since for run in self._replicas.runs]
        text = (
            f"Your job is number {position + len(running)} in the line for "
            f"{entry.what.model.repo_id}."
        )
        wait = self._run_times.wait(
            position, self._replicas.serving, running, time.monotonic(), work_ahead_s
        )
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
