"""The queue of one model and generation, and the workers that empty it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import ReplicaRequest
from ndif.cluster.models import Model
from ndif.cluster.replica import DeploymentError, EvictedError, Replica
from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.host.job import Job
from ndif.host.port import (
    EndedError,
    NotSharedError,
    ReplicaEvictedError,
    ReplicaLostError,
    RequestRunner,
    SharedPasses,
)
from ndif.placement.replica import ReplicaKey
from ndif.queue import sharing
from ndif.queue.fair_queue import FairQueue
from ndif.queue.lifecycle import QueueLifecycle
from ndif.queue.replicas import Replicas, ReplicaWorker
from ndif.queue.run_times import RunTimes, describe_wait
from ndif.schema.model_key import Variant
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.states import ProcessorStatus
from ndif.schema.status import Status
from ndif.sizes import format_size
from ndif.stores.accounts import PROBER
from ndif.stores.broker import BrokerUnavailableError, ClientLeftError
from ndif.tasks import end

logger = logging.getLogger(__name__)

_NOT_PROVIDED = "The server failed while it set the model up; its log says why."
_DEFECT = "The server failed while it ran this job; its log says why."
_PROVISIONING = "A replica is being set up for your model."
_COUNT_SHARE = 0.1
"""Largest share of the time for counting the places of polled requests."""
_UPDATE_SHARE = 0.1
"""Largest share of the time for reporting positions to live clients, including tasks that run meanwhile."""
_MAX_PAUSE_S = 60.0
"""Longest pause between two rounds of positions: an unavailable broker can make a round long."""
_UPDATES_AT_ONCE = 8
"""Updates after which other tasks of the process get to run."""
_BACK_OFF_S = 30.0
"""Seconds before a further replica is requested, after a replica failed to come while others serve."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Settings that every queue of a server shares."""

    update_interval_s: float = 3.0
    """Seconds between position updates to a waiting client."""
    max_attempts: int = 2
    """Most runs of a request whose replicas fail."""
    head_start_s: float = 60.0
    patience: int = 32

    @classmethod
    def of(cls, settings: Settings) -> QueuePolicy:
        """Return the policy that the settings describe."""
        return cls(
            settings.processor_reply_freq_s,
            settings.max_attempts,
            settings.line_head_start_s,
            settings.line_patience,
        )

    def update_pause_s(self, took_s: float) -> float:
        """Return the seconds until the next round of positions, after one that took `took_s`.

        Ten thousand clients take a second of one core, so they get fewer updates and jobs go on.
        """
        return max(self.update_interval_s, min(took_s / _UPDATE_SHARE, _MAX_PAUSE_S))


@dataclass(slots=True)
class LoadSample:
    """Maxima of a processor's load since the previous sample."""

    running: int = 0
    waiting: int = 0
    refused: bool = False
    """True if requested replicas did not come."""


class Processor:
    """Runs the requests of one model, fairly between users, each on the first idle replica.

    Owns a `FairQueue` of waiting requests and one worker task per replica. Requests replicas from the
    controller, and returns a request to the queue when its replica is lost. The `QueueLifecycle` keeps
    states and delivers ends. A processor never loads models or stores results.
    """

    def __init__(
        self,
        model: Model,
        generation: str,
        controller: Controller,
        lifecycle: QueueLifecycle,
        policy: QueuePolicy,
        enqueue: Callable[[Job], Awaitable[None]],
    ) -> None:
        """Prepare an empty queue; `enqueue` puts a job into its model's queue, which may have changed."""
        self.model = model
        self.variant = Variant(model.key, generation)
        self.least_replicas = model.least_in(generation)
        """Replicas that the operator asks for."""
        self.desired_replicas = self.least_replicas
        """Replicas that the model should have now."""
        self._controller = controller
        self._lifecycle = lifecycle
        self._policy = policy
        self._enqueue = enqueue
        self.queue: FairQueue[Job] = FairQueue(policy.head_start_s, policy.patience)
        self.replicas = Replicas()
        self.last_used: float | None = None
        """Event-loop time at which a request last began or ended to run; None before any."""
        self._run_times = RunTimes()
        self._arrived = asyncio.Event()
        """Set when a worker should check the queue."""
        self._short = asyncio.Event()
        """Set when replicas may be missing."""
        self._not_before = 0.0
        self._workers: set[asyncio.Task[None]] = set()
        self._returning: set[asyncio.Task[None]] = set()
        """Requests that wait for their client before they wait in the queue again."""
        self._is_providing = self._is_provisioning = False
        self._holds = 0
        self._load = LoadSample()
        # Both as last counted, in containers whose content the garbage collector need not scan.
        self._places, self._work_ahead_s = dict[str, int](), list[float]()
        self._count_again = 0.0
        self._is_cancelled = False

    # State

    @property
    def status(self) -> ProcessorStatus:
        """Return CANCELLED once stopped, PROVISIONING while a replica is sought, else `Replicas.status`."""
        if self._is_cancelled:
            return ProcessorStatus.CANCELLED
        status = self.replicas.status
        if status is ProcessorStatus.UNINITIALIZED and self._is_provisioning:
            return ProcessorStatus.PROVISIONING
        return status

    @property
    def idle(self) -> bool:
        """Return True if nothing waits, nothing runs and no replica exists or is being created."""
        return not (self.queue or self._returning or self._workers or self._is_providing)

    def expected_wait_s(self, position: int, work_ahead_s: float | None = None) -> float | None:
        """Estimate the seconds until the request at `position` starts; None without run-time history."""
        running = self.replicas.busy
        now = asyncio.get_running_loop().time()
        serving = self.replicas.serving
        return self._run_times.wait_s(position, serving, running, now, work_ahead_s)

    def take_load_sample(self) -> LoadSample:
        """Return the maxima since the last call, and reset them."""
        load = self._load
        self._load = LoadSample(len(self.replicas.busy), self._waiting)
        return load

    @property
    def _waiting(self) -> int:
        """Return the number of waiting requests; 0 if only probes wait, for which no replica is added."""
        return len(self.queue) if any(job.user != PROBER for job in self.queue) else 0

    # Requests and orders

    async def enqueue(self, job: Job) -> None:
        """Put a job into the queue and report the position to its client."""
        job.cost = self._run_times.expected(job.user)
        self.queue.add(job)
        self._load.waiting = max(self._load.waiting, self._waiting)
        position = self.queue.position(job.id) if job.is_live else None
        self._arrived.set()
        if len(self.replicas.staying) < self._needed:
            self._short.set()
        if position is not None:  # else the next regular update reports it
            await self._send_position(job, position)

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        updates = asyncio.create_task(self._update_positions(), name="queue positions")
        try:
            await self._provide_forever()
        finally:
            updates.cancel()
            await end([*self._workers, *self._returning])
            self._is_cancelled = True

    def adopt(self, replica_ids: Iterable[str]) -> None:
        """Start a worker for each of these replicas that has none."""
        for worker in self.replicas.add(replica_ids):
            task = asyncio.create_task(self._work(worker), name=f"replica {worker.id}")
            self._workers.add(task)
            task.add_done_callback(self._worker_ended)

    def add_replicas(self, replicas: int) -> None:
        """Desire this many replicas; they are requested while requests wait."""
        self.desired_replicas = replicas
        self._short.set()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Keep requests waiting while replicas are replaced, whether the new ones come up or not.

        Meanwhile this processor requests no replica.
        """
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._short.set()

    def scale(self, replicas: int) -> tuple[ReplicaKey, ...]:
        """Evict replicas beyond this many, idle ones first, and return the keys of the evicted replicas.

        `provision` requests missing ones.
        """
        self.desired_replicas = replicas
        staying = self.replicas.staying
        staying.sort(key=lambda worker: (not worker.runs, not worker.serving))
        keys = [(str(self.variant), worker.id) for worker in staying[replicas:]]
        if not keys:
            return ()
        evicted = self._controller.evict(replica_keys=keys, why="fewer replicas are wanted")
        self._controller.dedicate(self.model)  # idle replicas may be the dedicated ones
        return evicted

    def replica_requests(self, replicas: int) -> list[ReplicaRequest]:
        """Return the requests to the controller, in order, that lead to this many replicas.

        Missing dedicated replicas come first. Further replicas, as of any model, evict only unprotected
        replicas, and wait for replicas that have yet to run their first job.
        """
        generation = self.variant.generation
        first = self.model.dedicated_in(generation)
        hot = self._controller.cluster.hot(str(self.variant))
        counts = [first] if sum(replica.dedicated for replica in hot) < first < replicas else []
        gated = any(job.request.gated for job in self.queue)
        return [
            ReplicaRequest(self.model, generation, count, gated) for count in [*counts, replicas]
        ]

    @property
    def _needed(self) -> int:
        """Return the number of replicas that waiting requests need."""
        return max(1, self.desired_replicas)

    def remove_replica(self, replica_id: str, why: str) -> None:
        """Send no further request to a replica that leaves its device."""
        worker = self.replicas.find(replica_id)
        if worker is not None:
            logger.info("%s loses replica %s: %s", self.variant, replica_id, why)
            worker.leaving = True
            self._arrived.set()
            if self.queue:
                self._short.set()

    def await_client_of(self, job: Job) -> bool:
        """Take a job out of the queue until its client is back; return False if it does not wait."""
        if self.queue.remove(job.id) is None:
            return False
        self._await_client(job)
        return True

    async def notify_waiting(self, text: str) -> None:
        """Notify all waiting clients, including polling clients; their jobs go on waiting."""
        for job in list(self.queue):
            await self._report(job, Response(job.id, Status.QUEUED, text))

    async def fail_waiting(
        self, reason: str, unless: Callable[[Request], bool] = lambda _: False
    ) -> int:
        """End every waiting job as an ERROR, except some, and return how many have ended."""
        return await self._fail(self.queue.remove_all(lambda job: not unless(job.request)), reason)

    async def _fail(self, jobs: list[Job], reason: str) -> int:
        for first in range(0, len(jobs), _UPDATES_AT_ONCE):
            batch = jobs[first : first + _UPDATES_AT_ONCE]
            await asyncio.gather(*(self._lifecycle.fail(job, reason) for job in batch))
        return len(jobs)

    # Updates to waiting clients

    def update_of(self, request_id: str) -> tuple[Request, Response] | None:
        """Return a waiting request and its update as of now; None if it does not wait here.

        Clients that poll get their updates from here: storing each update of a long queue would delay all
        jobs.
        """
        job = self.queue.find(request_id)
        if job is None:
            return None
        if time.monotonic() >= self._count_again:
            self._count_places()
        place = self._places.get(request_id)  # None for a job that came since the count
        text = f"Your job waits in the queue for {job.request.model.repo_id}."
        if place is not None:
            text = self._position_text(job, place + 1, self._work_ahead_s[place])
        return job.request, self._waiting_update(job, text)

    def _waiting_update(self, job: Job, position: str) -> Response:
        """Return the update of a waiting job: the state of its model, and its position."""
        status = self.status
        if status is ProcessorStatus.PROVISIONING:
            return Response(job.id, Status.PROVISIONING, f"{_PROVISIONING} {position}")
        if status is ProcessorStatus.DEPLOYING:
            return Response(job.id, Status.DEPLOYING, f"{self._loading_text} {position}")
        return Response(job.id, Status.QUEUED, position)

    def _count_places(self) -> None:
        """Count the places of all waiting jobs; the longer that takes, the later is the next count."""
        began = time.monotonic()
        self._places, self._work_ahead_s, work_ahead_s = {}, [], 0.0
        for place, job in enumerate(self.queue.order()):
            self._places[job.id] = place
            self._work_ahead_s.append(work_ahead_s)
            work_ahead_s += self._run_times.expected(job.user)
        ended = time.monotonic()
        self._count_again = ended + (ended - began) / _COUNT_SHARE

    @property
    def _loading_text(self) -> str:
        """Return the state of a model that is loading, in words."""
        generation = self.variant.generation
        text = f"The model is being loaded for nnsight {generation}"
        replicas = (self._controller.replica(self.variant, worker.id) for worker in self.replicas)
        progress = [
            replica.progress for replica in replicas if replica is not None and replica.progress
        ]
        if progress:
            loaded, total = max(progress)
            text += f": {format_size(loaded)} of {format_size(total)} are read"
        load_s = self.model.load_s.get(generation)
        if load_s is not None:
            text += f" (the last time it took {format_duration(round(load_s, 1))})"
        return f"{text}."

    async def _update_positions(self) -> None:
        """Report positions to all waiting live clients periodically, until cancelled."""
        took_s = 0.0
        while True:
            await asyncio.sleep(self._policy.update_pause_s(took_s))
            began, work_ahead_s = time.monotonic(), 0.0
            for job, position in self.queue.positions() if self.queue else ():
                await self._send_position(job, position, work_ahead_s)
                work_ahead_s += self._run_times.expected(job.user)
                if position % _UPDATES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            took_s = time.monotonic() - began

    async def _send_position(
        self, job: Job, position: int, work_ahead_s: float | None = None
    ) -> None:
        if job.is_live:
            text = self._position_text(job, position, work_ahead_s)
            await self._report(job, self._waiting_update(job, text))

    def _position_text(self, job: Job, position: int, work_ahead_s: float | None) -> str:
        """Return a position in words, with the estimated start where run times are known."""
        text = (
            f"Your job is number {position + len(self.replicas.runs)} in the queue for "
            f"{job.request.model.repo_id}."
        )
        wait_s = self.expected_wait_s(position, work_ahead_s)
        if wait_s is not None:
            text += f" Estimated start: in {describe_wait(wait_s)}."
        return text

    async def _report_to_live_clients(self, status: Status, text: str) -> None:
        for job in list(self.queue):
            if job.is_live:
                await self._report(job, Response(job.id, status, text))

    async def _report(self, job: Job, update: Response) -> None:
        try:
            await self._lifecycle.report(job, update)
        except Exception:
            # The request waits all the same, and its client gets a later update.
            logger.exception("request %s: its position could not be delivered", job.id)

    # Replicas

    async def _provide_forever(self) -> None:
        """Request replicas whenever requests wait and fewer replicas exist than are needed."""
        while True:
            await self._short.wait()
            self._short.clear()
            if self._holds or not self.queue or len(self.replicas.staying) >= self._needed:
                continue
            loop = asyncio.get_running_loop()
            if self.replicas.staying and loop.time() < self._not_before:
                loop.call_at(self._not_before, self._short.set)
                continue
            self._is_providing = True
            try:
                await self.provision()
            except Exception:
                # A defect of the server must not leave waiting clients without an answer.
                logger.exception("%s could not be provided", self.variant)
                await self.fail_waiting(_NOT_PROVIDED)
            finally:
                self._is_providing = False

    async def provision(self) -> None:
        """Request missing replicas; end waiting jobs with the reason if there will be none."""
        # No model is loaded for clients that have left, or for users without permission to have one loaded.
        disconnected = await self._lifecycle.disconnected(job.request for job in self.queue)
        for job in self.queue.remove_all(lambda job: job.id in disconnected):
            self._await_client(job)
        # A model that an operator deployed was loaded when these requests were admitted.
        if self.model.on_demand and not self.model.dedicated:
            refused = self.queue.remove_all(lambda job: not job.request.hotswapping)
            models, named = self._controller.models, self.variant.model
            await self._fail(refused, models.not_open(named, None, self.variant.generation))
        await self._refuse_unpermitted()
        if not self.queue:
            return
        is_first = not self.replicas.staying
        self._is_provisioning = True
        try:
            if is_first:
                await self._report_to_live_clients(Status.PROVISIONING, _PROVISIONING)
            for request in self.replica_requests(self._needed):
                (provided,) = await self._controller.deploy([request])
                self.adopt(provided.replica_ids)
                if request.void or provided.problem is not None:
                    break
        finally:
            self._is_provisioning = False
        await self._refuse_unpermitted()  # the hub's restrictions may be known only now
        if self.model.same_as is not None:
            for job in list(self.queue):
                # One by one: a request in neither queue could not be cancelled, or left by its client.
                if self.queue.remove(job.id) is not None:
                    await self._enqueue(job)
            return
        if request.withdrawn:
            self._short.set()  # requests that wait now came after the withdrawal
            return
        if provided.problem is not None:
            logger.warning("%s", provided.problem)
            self._load.refused = True
            self._back_off()
        if not self.replicas.staying:
            await self.fail_waiting(provided.problem or "The model has no replica.")
        elif is_first:
            await self._report_to_live_clients(Status.DEPLOYING, self._loading_text)

    async def _refuse_unpermitted(self) -> None:
        """Fail waiting jobs whose users may not have this model loaded on demand."""
        if self.model.same_as is not None:  # the model that is served instead decides
            return
        models = self._controller.models
        why = {
            gated: models.not_permitted(self.variant.model, self.model, gated=gated)
            for gated in (False, True)
        }
        removed = self.queue.remove_all(lambda job: why[job.request.gated] is not None)
        for gated, reason in why.items():
            await self._fail([job for job in removed if job.request.gated is gated], reason or "")

    def _back_off(self) -> None:
        self._not_before = asyncio.get_running_loop().time() + _BACK_OFF_S

    async def _work(self, worker: ReplicaWorker) -> None:
        """Serve the queue with one replica, from when it comes up until it leaves."""
        replica = self._controller.replica(self.variant, worker.id)
        failure: DeploymentError | None = None
        try:
            if replica is not None:
                with replica.lease:
                    await replica.up()
                    worker.status = ProcessorStatus.READY
                    while jobs := await self._next(worker, replica):
                        run, passes = (
                            partial(self._run, worker, replica),
                            replica.actor.shared_passes,
                        )
                        if passes is None or len(jobs) == 1:
                            await run(jobs[0], replica.actor)
                        else:
                            await sharing.run(passes, jobs, run)
                        replica.mark_used()
        except EvictedError:
            pass  # waiting requests ask for another
        except DeploymentError as error:
            failure = error
        finally:
            self.replicas.remove(worker)
        if failure is not None:
            self._back_off()  # requests that other replicas serve are not concerned
            self._load.refused = True  # pauses before the next requests grow
            is_last = not (self.replicas.staying or self._is_provisioning or self._holds)
            if is_last:
                await self.fail_waiting(str(failure))

    async def _next(self, worker: ReplicaWorker, replica: Replica) -> list[Job]:
        """Wait for the next jobs of a replica, to run at once; return an empty list once it leaves."""
        while not worker.leaving:
            if not self.queue:
                # The replica is idle, so earlier use by one user must delay no other user.
                self.queue.reset()
                self._arrived.clear()
                replica.mark_used()
            await self._arrived.wait()
            jobs = [] if worker.leaving else self._take(replica.actor.shared_passes)
            # The job that came may have been cancelled, or sent to another replica, meanwhile.
            if jobs and not replica.actor.ended.is_set():
                return jobs
            for job in jobs:
                self.queue.give_back(job)
            if jobs:
                self._controller.lost(replica)
                break
        return []

    def _take(self, passes: SharedPasses | None) -> list[Job]:
        """Take the next job and the jobs that share its forward pass; an empty list if none waits."""
        if passes is not None:
            return sharing.take(self.queue, passes.most)
        job = self.queue.take() if self.queue else None
        return [] if job is None else [job]

    async def _run(
        self,
        worker: ReplicaWorker,
        replica: Replica,
        job: Job,
        runner: RequestRunner,
        sharers: int = 1,
    ) -> None:
        """Run a job to its end, or give it back; `sharers` jobs share the time of the replica."""
        lifecycle = self._lifecycle
        try:
            with self._busy(worker, job):
                try:
                    response = await lifecycle.dispatch(job, runner, worker.id)
                    ran_s = (asyncio.get_running_loop().time() - job.run_since) / sharers
                    self._run_times.measured(job.user, ran_s)
                    self.queue.settle(job, ran_s)
                    await lifecycle.complete(job, response)
                except EndedError:
                    await lifecycle.release(job.request)
                except ClientLeftError:
                    self._await_client(job)
        except (BrokerUnavailableError, NotSharedError, ReplicaLostError) as error:
            is_lost = isinstance(error, ReplicaLostError)
            if is_lost:
                worker.leaving = True
                if not isinstance(error, ReplicaEvictedError):
                    self._controller.lost(replica)
            job.exclusive |= isinstance(error, NotSharedError)
            if await lifecycle.give_back(job, error):
                self.queue.give_back(job)
                self._arrived.set()
                if is_lost:
                    self._short.set()
        except Exception:
            # The next request has nothing to do with this defect.
            logger.exception("request %s could not be brought to its end", job.id)
            await lifecycle.fail(job, _DEFECT)

    @contextlib.contextmanager
    def _busy(self, worker: ReplicaWorker, job: Job) -> Iterator[None]:
        """Mark a job as running and its replica as busy."""
        clock = asyncio.get_running_loop().time
        self.last_used = job.run_since = clock()
        worker.runs.append(job)
        worker.status = ProcessorStatus.BUSY
        self._load.running = max(self._load.running, len(self.replicas.busy))
        try:
            yield
        finally:
            worker.runs.remove(job)
            if not worker.runs:
                worker.status = ProcessorStatus.READY
            self.last_used = clock()

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        self._workers.discard(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=defect)
        if self.queue:
            self._short.set()

    def _await_client(self, job: Job) -> None:
        """Make a job wait for its client, and then in the queue again."""
        task = asyncio.create_task(self._return(job), name=f"client of {job.id}")
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _return(self, job: Job) -> None:
        if await self._lifecycle.give_back(job):
            await self._enqueue(job)
