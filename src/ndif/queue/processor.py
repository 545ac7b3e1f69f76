"""Processor: the line of one model in one runtime (specification, section 4.2, and 003)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from ndif.cluster.asking import Asked
from ndif.cluster.controller import Controller
from ndif.cluster.deployment import ReplicaKey
from ndif.cluster.hosted import DeploymentError, EvictedError, Hosted
from ndif.cluster.models import Model
from ndif.host.port import Actor, EndedError, ReplicaEvictedError, ReplicaLostError
from ndif.queue.attempts import Attempts
from ndif.queue.estimates import RunTimes
from ndif.queue.line import Entry, Line
from ndif.queue.replicas import ProcessorStatus, Replica, Replicas, Run
from ndif.queue.responder import Responder
from ndif.queue.service import Service
from ndif.queue.updates import Updates
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.schema.variant import Variant
from ndif.stores.broker import Broker, ClientLeftError
from ndif.tasks import end

logger = logging.getLogger(__name__)

_BACK_OFF_S = 30.0
"""How long no further replica is asked for, after one could not be had, while others serve."""


@dataclass(frozen=True, slots=True)
class Customs:
    """What is the same in every line of a server."""

    reply_freq_s: float = 3.0
    """Seconds between updates to those who wait."""
    max_attempts: int = 2
    """How often a request is run whose replica is lost."""
    head_start_s: float = 60.0
    patience: int = 32


@dataclass(slots=True)
class Peak:
    """The most that there was at once, since somebody looked last."""

    running: int = 0
    waiting: int = 0
    refused: bool = False
    """Whether replicas were asked for in vain."""


class Processor:
    """Has the users of a model take turns, each request on whichever replica is idle first."""

    def __init__(
        self,
        model: Model,
        generation: str,
        controller: Controller,
        broker: Broker,
        responder: Responder,
        customs: Customs,
    ) -> None:
        self.model = model
        self.variant = Variant(model.key, generation)
        self.least_replicas = model.least_in(generation)
        """As many as its operator asks for."""
        self.desired_replicas = self.least_replicas
        """And as many as there are to be now."""
        self._controller = controller
        self._broker = broker
        self._customs = customs
        self.line: Line[Request] = Line(customs.head_start_s, customs.patience)
        """Those who wait."""
        self.put_in_line: Callable[[Request], Awaitable[None]] = self.enqueue
        """Has a request wait in the line of its model, whichever that is by now."""
        self.replicas = Replicas()
        """Those who serve."""
        self._run_times = RunTimes()
        self._updates = Updates(self.line, self.replicas, self._run_times, responder)
        self._arrived = asyncio.Event()
        self._short = asyncio.Event()
        self._not_before = 0.0
        self._attempts = Attempts(customs.max_attempts)
        self._service = Service(broker, responder, self._attempts)
        self._workers: set[asyncio.Task[None]] = set()
        self._seeing_off: dict[str, asyncio.Task[None]] = {}
        """Requests whose clients were away when they were to run."""
        self._provisioning = False
        self._peak = Peak()
        self._ended = False

    # What it is

    @property
    def status(self) -> ProcessorStatus:
        """What it is doing."""
        if self._ended:
            return ProcessorStatus.CANCELLED
        status = self.replicas.status
        if status is ProcessorStatus.UNINITIALIZED and self._provisioning:
            return ProcessorStatus.PROVISIONING
        return status

    @property
    def idle(self) -> bool:
        """Whether it has neither requests nor replicas."""
        there = self.line or self._seeing_off or list(self.replicas) or self._provisioning
        return not there

    def expected_wait_s(self, position: int) -> float | None:
        """Seconds until whoever is at that place of the line starts, where something is known of it."""
        return self._updates.wait_s(position)

    def since_last_seen(self) -> Peak:
        """The most that ran and waited at once since this was last asked."""
        peak = self._peak
        self._peak = Peak(len(self.replicas.runs), len(self.line))
        return peak

    # What it is told

    async def enqueue(self, request: Request) -> None:
        """Put a request in line and tell its user the position."""
        entry = Entry(
            request.id,
            request.user,
            request,
            request.received,
            weight=request.weight,
            priority=request.priority,
        )
        entry = replace(entry, cost=self._run_times.expected(entry))
        self.line.add(entry)
        self._peak.waiting = max(self._peak.waiting, len(self.line))
        position = self.line.position(request.id)
        self._arrived.set()
        if len(self.replicas) < self._needed:
            self._short.set()
        if position is not None:  # else the next of the regular updates says it
            await self._updates.position(entry, position)

    async def run(self) -> None:
        """Serve the line until cancelled."""
        replies = asyncio.create_task(
            self._updates.repeat(self._customs.reply_freq_s), name="queue positions"
        )
        try:
            await self._provide_forever()
        finally:
            replies.cancel()
            await end([*self._workers, *self._seeing_off.values()])
            self._ended = True

    def adopt(self, replica_ids: Iterable[str]) -> None:
        """Serve with these replicas, too: they are there, or are coming."""
        for replica_ in self.replicas.set_replica_ids(replica_ids):
            worker = asyncio.create_task(self._work(replica_), name=f"replica {replica_.id}")
            self._workers.add(worker)
            worker.add_done_callback(self._worker_ended)

    def add_replicas(self, replicas: int) -> None:
        """Have as many replicas, if somebody still waits."""
        self.desired_replicas = replicas
        self._short.set()

    def scale(self, replicas: int) -> tuple[ReplicaKey, ...]:
        """Have no more replicas than that, and tell which had to go: who is idle goes first.

        More are asked for by `provision`.
        """
        self.desired_replicas = replicas
        staying = [replica_ for replica_ in self.replicas if not replica_.leaving]
        staying.sort(key=lambda replica_: (replica_.run is None, not replica_.serving))
        keys = [(str(self.variant), replica_.id) for replica_ in staying[replicas:]]
        if not keys:
            return ()
        gone = self._controller.evict(replica_keys=keys, why="fewer replicas are wanted")
        self._controller.dedicate(self.model)  # the idle are not always those that were not
        return gone

    def asked(self, replicas: int) -> list[Asked]:
        """So many replicas, as they are to be asked for one after the other.

        First those that are to be dedicated, if any are missing: further ones displace only whom any
        model's may, and wait for those who have yet to do their first job.
        """
        generation = self.variant.generation
        first = self.model.dedicated_in(generation)
        hot = self._controller.cluster.hot(str(self.variant))
        counts = [first] if sum(d.dedicated for d in hot) < first < replicas else []
        return [Asked(self.model, generation, count) for count in [*counts, replicas]]

    @property
    def _needed(self) -> int:
        """How many replicas there are to be while somebody waits."""
        return max(1, self.desired_replicas)

    def remove_replica(self, replica_id: str, why: str) -> None:
        """A replica is leaving its device: it takes nothing more."""
        replica_ = self.replicas.find(replica_id)
        if replica_ is not None:
            logger.info("%s loses replica %s: %s", self.variant, replica_id, why)
            replica_.leaving = True
            self._arrived.set()
            if self.line:
                self._short.set()

    async def cancel(self, request_id: str, reason: str) -> bool:
        """End a request wherever it is; whether it was here, and had no answer yet."""
        waiting = self.line.remove(request_id)
        if waiting is not None:
            await self._service.finish(waiting.what, Response(request_id, Status.ERROR, reason))
            return True
        for run in self.replicas.runs:
            if run.entry.id == request_id and not run.answered:
                self._attempts.cancel(request_id, reason)
                run.actor.cancel(reason)
                return True
        if request_id in self._seeing_off:
            self._attempts.cancel(request_id, reason)
            return True
        return False

    async def tell_everybody(self, text: str) -> None:
        """Tell all those who wait, who go on waiting."""
        await self._updates.everybody(Status.QUEUED, text)

    async def dismiss(self, reason: str) -> int:
        """Tell everybody who waits that it is in vain; how many they were."""
        dismissed = self.line.remove_all(lambda _: True)
        for waiting in dismissed:
            await self._service.finish(waiting.what, Response(waiting.id, Status.ERROR, reason))
        return len(dismissed)

    # Replicas

    async def _provide_forever(self) -> None:
        """Ask for replicas whenever somebody waits and there are fewer than there should be."""
        while True:
            await self._short.wait()
            self._short.clear()
            if not self.line or len(self.replicas) >= self._needed:
                continue
            loop = asyncio.get_running_loop()
            if len(self.replicas) and loop.time() < self._not_before:
                loop.call_at(self._not_before, self._short.set)
                continue
            try:
                await self.provision()
            except Exception:
                # A defect of ours must not leave those who wait without a word.
                logger.exception("%s could not be provided", self.variant)
                await self.dismiss("The server failed while it set the model up; its log says why.")

    async def provision(self) -> None:
        """Have as many replicas as desired, or tell those who wait why there are none."""
        await self._let_go_of_those_who_left()
        await self._refuse_without_access()
        if not self.line:
            return
        alone = not len(self.replicas)
        self._provisioning = True
        try:
            if alone:
                await self._updates.everybody(
                    Status.PROVISIONING, "A replica is being set up for your model."
                )
            for asked in self.asked(self._needed):
                (provided,) = await self._controller.deploy([asked])
                self.adopt(provided.replica_ids)
                if asked.void or provided.problem is not None:
                    break
        finally:
            self._provisioning = False
        if self.model.same_as is not None:
            for entry in self.line.remove_all(lambda _: True):
                await self.put_in_line(entry.what)
            return
        if asked.withdrawn:
            self._short.set()  # who is in line now has come since
            return
        if provided.problem is not None:
            logger.warning("%s", provided.problem)
            self._peak.refused = True
            self._back_off()
        if not len(self.replicas):
            await self.dismiss(provided.problem or "The model has no replica.")
        elif alone:
            await self._updates.everybody(
                Status.DEPLOYING,
                f"The model is being loaded for nnsight {self.variant.generation}.",
            )

    async def _let_go_of_those_who_left(self) -> None:
        """Nothing is loaded for those who do not wait for it any more."""
        sessions = {entry.what.session for entry in self.line} - {None}
        absent = await self._broker.absent(s for s in sessions if s is not None)
        for gone in self.line.remove_all(lambda entry: entry.what.session in absent):
            await self._service.let_go(gone.what)

    async def _refuse_without_access(self) -> None:
        """Nobody's model is loaded on demand who may not have that."""
        if self.model.dedicated:
            return
        for waiting in self.line.remove_all(lambda entry: not entry.what.hotswapping):
            reason = self._controller.models.not_dedicated(self.variant.model)
            await self._service.finish(waiting.what, Response(waiting.id, Status.ERROR, reason))

    def _back_off(self) -> None:
        self._not_before = asyncio.get_running_loop().time() + _BACK_OFF_S

    async def _work(self, replica_: Replica) -> None:
        """Serve the line with one replica: whichever is idle first takes what is next."""
        hosted = self._controller.hosted(self.variant, replica_.id)
        failure: DeploymentError | None = None
        try:
            if hosted is not None:
                with hosted.lease:
                    await hosted.up()
                    replica_.status = ProcessorStatus.READY
                    await self._serve_with(replica_, hosted)
        except EvictedError:
            pass  # those who wait ask for another
        except DeploymentError as error:
            failure = error
        finally:
            self.replicas.remove(replica_)
        if failure is not None:
            self._back_off()  # of no concern to those whom others serve
            self._peak.refused = True  # the next is asked for later and later
            if not len(self.replicas) and not self._provisioning:
                await self.dismiss(str(failure))
        if self.line:
            self._short.set()

    async def _serve_with(self, replica_: Replica, hosted: Hosted) -> None:
        while not replica_.leaving:
            if not self.line:
                # A replica that finds nothing tells the line so: nobody waits for what others have had.
                self.line.take()
                self._arrived.clear()
                hosted.was_of_use()
            await self._arrived.wait()
            entry = self.line.take() if self.line and not replica_.leaving else None
            # Who waited may have been cancelled, or served by another, meanwhile.
            if entry is None:
                continue
            if hosted.actor.ended.is_set():
                self.line.give_back(entry)
                self._controller.lost(hosted)
                return
            try:
                await self._serve(replica_, hosted.actor, entry)
            except ReplicaLostError as error:
                replica_.leaving = True
                if not isinstance(error, ReplicaEvictedError):
                    self._controller.lost(hosted)
                await self._retry(entry, error)
                return
            except Exception:
                # Of whatever could not be told or stored, the next request knows nothing.
                logger.exception("request %s could not be brought to its end", entry.id)
                await self._service.release(entry.what)
            hosted.was_of_use()

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and (defect := worker.exception()) is not None:
            logger.error("%s failed", worker.get_name(), exc_info=defect)

    # One request

    async def _serve(self, replica_: Replica, actor: Actor, entry: Entry[Request]) -> None:
        replica_.status = ProcessorStatus.BUSY
        run = replica_.run = Run(entry, actor, asyncio.get_running_loop().time())
        try:
            self._peak.running = max(self._peak.running, len(self.replicas.runs))
            response = await self._service.run(entry.what, actor)
            run.answered = True
            ran_s = asyncio.get_running_loop().time() - run.since
            self._run_times.measured(entry, ran_s)
            self.line.settle(entry, ran_s)
            await self._service.finish(entry.what, response)
        except EndedError:
            await self._service.ended(entry.what)
        except ClientLeftError:
            seeing_off = asyncio.create_task(self._see_off(entry.what), name=f"end of {entry.id}")
            self._seeing_off[entry.id] = seeing_off
            seeing_off.add_done_callback(lambda _: self._seeing_off.pop(entry.id, None))
        finally:
            run.over.set()
            replica_.run, replica_.status = None, ProcessorStatus.READY

    async def _see_off(self, request: Request) -> None:
        """End a request whose client has left; one whose client is back waits again."""
        if await self._service.has_left(request):
            # Whoever comes back later than that finds this.
            left = Response(request.id, Status.ERROR, "The client left.")
            await self._service.finish(request, left)
        else:
            await self.put_in_line(request)

    async def _retry(self, entry: Entry[Request], error: ReplicaLostError) -> None:
        """Give a request back to the head of the line, as often as it may be tried."""
        if await self._service.has_ended(entry.what):  # the replica was lost after that
            await self._service.ended(entry.what)
            return
        why_not = self._attempts.lost(entry.id, error)
        if why_not is None:
            self.line.give_back(entry)
            self._arrived.set()
            self._short.set()
        else:
            await self._service.finish(entry.what, Response(entry.id, Status.ERROR, why_not))
