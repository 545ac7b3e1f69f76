"""A replica in a process of its own, and the jobs that a leader in another process sends to it.

The replica and its jobs outlive the leader. The current leader sends a job by a call or over the replica's
job channel, and may send a job twice. Updates and results do not pass through the leader: the leader gets
only a short answer, whose loss does no harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ndif.host.device_errors import DeviceFailure
from ndif.host.job import CLIENT_LEFT, Job
from ndif.host.lifecycle import Lifecycle
from ndif.host.port import (
    ActorError,
    EndedError,
    FailedDeviceError,
    ModelActor,
    ReplicaEvictedError,
    ReplicaLostError,
    ServedModel,
)
from ndif.placement.replica import PlacedReplica
from ndif.runtime.typed_json import from_json, to_json
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.states import DeploymentLevel
from ndif.stores.broker.encoding import decode_request
from ndif.stores.broker.port import Broker, BrokerError, BrokerUnavailableError, ClientLeftError
from ndif.stores.broker.signing import PROTOCOL
from ndif.stores.objects import ObjectStoreError
from ndif.stores.responder import Responder

if TYPE_CHECKING:
    # Only a node of a cluster has a client of Redis.
    from ndif.stores.broker.redis.job_channels import Introduction, JobReceiver

_EARLY = 1000
"""Cancellations that a replica remembers for jobs that have not arrived yet."""
_LOOK_S = 1.0
_DESCRIPTION = 200
"""Characters of a response's description that an answer has."""


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """A leader's order of a replica on a node."""

    config: DeploymentConfig
    generation: str
    place: PlacedReplica | None = None
    """The replica's place now; None for a process that only downloads the model's files."""
    gpus: tuple[str | None, ...] = ()
    """UUIDs of the node's GPUs, by the leader's index."""
    protected: tuple[str, ...] = ()
    """Repositories that stay in the Hub's cache."""


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """The facts that a leader needs to adopt a replica."""

    order: ReplicaOrder
    protocol: int
    level: DeploymentLevel | None
    """None until the replica has been loaded."""
    moving: bool
    ended: bool
    model: ServedModel | None
    requests: tuple[str, ...]
    """Ids of running, waiting and recently ended jobs."""


@dataclass(frozen=True, slots=True)
class MoveAnswer:
    """Result of a move to HOT: the loaded model, or the error and the failed GPU, if a GPU caused it."""

    model: ServedModel | None = None
    error: str = ""
    device: DeviceFailure | None = None


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """The end of a job with a shortened description, or the reason why the job did not end here."""

    end: Response | None = None
    why: Literal["", "lost", "evicted", "away"] = ""
    """`away`: the broker does not answer."""
    reason: str = ""


class NodeServices(NamedTuple):
    """The services of a replica on its node: the actor, not yet started, the stores and the job channel."""

    actor: ModelActor
    broker: Broker
    responder: Responder
    channel: JobReceiver


class ReplicaJobs:
    """The jobs that a leader has sent to one replica.

    Runs jobs one at a time on the replica's `ModelActor`, in the leader's order. A `Lifecycle` keeps their
    states and ends.
    """

    def __init__(self, services: NodeServices, replica_id: str = "") -> None:
        """Run jobs with these services; `replica_id` names the replica in the log."""
        self._name = replica_id
        self._actor = services.actor
        self._channel = services.channel
        self._lifecycle = Lifecycle(services.broker, services.responder)
        self._lock = asyncio.Lock()
        self._current: Job | None = None
        self._runs: dict[str, asyncio.Task[JobAnswer]] = {}
        self._cancelled_early: dict[str, str] = {}

    @property
    def known(self) -> list[str]:
        """Return the ids of running, waiting and recently ended jobs."""
        return [*self._runs, *self._lifecycle.remembered]

    async def run(self, request: Request) -> JobAnswer:
        """Run a job and return its end, or the reason why it did not end here.

        A running or ended job does not run again. While a job runs, other jobs wait.
        """
        if (end := self._lifecycle.end_of(request.id)) is not None:
            await self._lifecycle.release(request)
            return _answer(end)
        if request.id not in self._runs:
            self._runs[request.id] = asyncio.create_task(self._run(request), name=request.id)
        return await asyncio.shield(self._runs[request.id])

    async def run_from_channel(self) -> None:
        """Run the jobs of the job channel until cancelled."""
        jobs: set[asyncio.Task[None]] = set()
        while True:
            request = await self._channel.next()
            job = asyncio.create_task(self._run_or_give_back(request), name="job")
            jobs.add(job)
            job.add_done_callback(jobs.discard)

    def cancel(self, request_id: str, reason: str) -> None:
        """End a running, waiting or not yet arrived job as an ERROR with `reason`."""
        if self._lifecycle.cancel(request_id, reason) or self._lifecycle.end_of(request_id):
            return
        self._cancelled_early[request_id] = reason
        if len(self._cancelled_early) > _EARLY:
            del self._cancelled_early[next(iter(self._cancelled_early))]

    def revoke_cancel(self, request_id: str) -> None:
        """Revoke the cancellation of a job that has not arrived yet."""
        self._cancelled_early.pop(request_id, None)

    async def _run_or_give_back(self, request: Request) -> None:
        answer = await self.run(request)
        if answer.end is None:
            await self._channel.give_back(request)

    async def _run(self, request: Request) -> JobAnswer:
        job = self._lifecycle.claim(request)
        if job is None:
            raise RuntimeError(f"request {request.id} is held already")
        if (reason := self._cancelled_early.pop(request.id, None)) is not None:
            self._lifecycle.cancel(request.id, reason)
        watching = asyncio.create_task(self._watch_current(), name="client of the current job")
        try:
            async with self._lock:
                watching.cancel()
                return await self._execute(job)
        finally:
            watching.cancel()
            del self._runs[request.id]

    async def _watch_current(self) -> None:
        """Cancel the running job once its client has left; the leader also does so, but may have ended."""
        while True:
            current = self._current
            if current is not None and await self._lifecycle.disconnected([current.request]):
                self.cancel(current.id, CLIENT_LEFT)
            await asyncio.sleep(_LOOK_S)

    async def _execute(self, job: Job) -> JobAnswer:
        self._current = job
        try:
            response = await self._lifecycle.dispatch(job, self._actor, self._name)
        except BrokerUnavailableError as error:
            await self._lifecycle.give_back(job)
            return JobAnswer(None, "away", str(error))
        except (ClientLeftError, EndedError, ReplicaLostError) as error:
            await self._lifecycle.give_back(job)
            evicted = isinstance(error, ReplicaEvictedError)
            return JobAnswer(None, "evicted" if evicted else "lost", str(error))
        finally:
            self._current = None
        return _answer(await self._lifecycle.complete(job, response))


def _answer(end: Response) -> JobAnswer:
    cost = {"execution_time": end.execution_s, "peak_memory": end.peak_memory}
    short = end.description[:_DESCRIPTION]
    return JobAnswer(replace(end, description=short, data=None, meta=cost))


class RemoteActor:
    """A server of one `ModelActor` for the current leader.

    Every method is idempotent: one leader, or two, may call it twice, and it acts once. Answers are JSON of
    a type in this file. `ReplicaJobs` runs the requests.
    """

    def __init__(self, order: bytes) -> None:
        """Keep the `ReplicaOrder` for the next leader; its place follows the replica."""
        self._order = from_json(ReplicaOrder, order)
        self._actor: ModelActor | None = None
        self._jobs: ReplicaJobs | None = None
        self._starting: asyncio.Task[bytes] | None = None
        self._progress = (0, 0)
        self._progressed = asyncio.Event()
        self._over = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._level: DeploymentLevel | None = None
        self._moving = False
        self._channel: JobReceiver | None = None
        self._leader: Introduction | None = None

    async def prepare(self) -> NodeServices:
        """Return the services of the replica on its node; raise an `ActorError` if that fails."""
        raise NotImplementedError

    async def fetch(self) -> str | None:
        """Download the model's files to the node; return the reason of a failure, else None."""
        raise NotImplementedError

    async def describe(self) -> bytes:
        """Return the `ReplicaDescription`."""
        described = ReplicaDescription(
            order=self._order,
            protocol=PROTOCOL,
            level=self._level,
            moving=self._moving,
            ended=self._over.is_set(),
            model=None if self._actor is None else self._actor.model,
            requests=() if self._jobs is None else tuple(self._jobs.known),
        )
        return to_json(described)

    async def follow(self, leader: Introduction) -> None:
        """Accept the current leader and its jobs.

        The leader is not an argument of the constructor, because Ray's head keeps constructor arguments,
        perhaps in Redis.
        """
        self._leader = leader
        if self._channel is not None:
            self._channel.take_from(leader)

    # Start, cache, stop

    async def start(self) -> bytes:
        """Load the model, from COLD to HOT, and return the `MoveAnswer`."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def _start(self) -> bytes:
        try:
            services = await self.prepare()
            place = self._order.place
            self._actor = services.actor
            self._jobs = ReplicaJobs(services, "" if place is None else place.replica_id)
            self._channel = services.channel
            if self._leader is not None:  # which may have changed
                self._channel.take_from(self._leader)
            self._watching = asyncio.create_task(self._watch(self._actor), name="end")
            if self._over.is_set():
                raise ActorError("the replica was ended before it was loaded")  # noqa: TRY301
            await self._actor.start(self._report_progress)
            self._running = asyncio.create_task(self._jobs.run_from_channel(), name="jobs")
        except (ActorError, BrokerError, ObjectStoreError) as error:
            self._over.set()
            return _refused(error)
        finally:
            self._progressed.set()
        return self._came_up(self._actor)

    def _came_up(self, actor: ModelActor) -> bytes:
        self._level = DeploymentLevel.HOT
        self._order = self._placed(deployed=time.time())
        return to_json(MoveAnswer(actor.model))

    def _placed(self, **changes: Any) -> ReplicaOrder:
        place = self._order.place
        return (
            self._order if place is None else replace(self._order, place=replace(place, **changes))
        )

    def _report_progress(self, loaded: int, total: int) -> None:
        self._progress = loaded, total
        self._progressed.set()

    async def progress(self, reported: tuple[int, int]) -> tuple[int, int]:
        """Return the loaded bytes and their total, once they differ from the `reported` values."""
        while self._progress == tuple(reported):
            self._progressed.clear()
            await self._progressed.wait()
        return self._progress

    async def to_cache(self) -> None:
        if self._actor is None or self._level is DeploymentLevel.WARM:
            return
        self._moving = True
        await self._actor.to_cache()
        self._order = self._placed(gpu_mem_bytes_by_id={})
        self._level, self._moving = DeploymentLevel.WARM, False

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> bytes:
        """Return the `MoveAnswer`. See `ModelActor.from_cache`."""
        if self._actor is None:
            return to_json(MoveAnswer(error="the replica was not started"))
        if self._level is DeploymentLevel.HOT:
            return to_json(MoveAnswer(self._actor.model))
        self._moving = True
        try:
            await self._actor.from_cache(gpu_mem_bytes_by_id)
        except ActorError as error:
            return _refused(error)
        self._order = self._placed(gpu_mem_bytes_by_id=dict(gpu_mem_bytes_by_id))
        self._moving = False
        return self._came_up(self._actor)

    async def stop(self) -> None:
        self._over.set()
        if self._actor is not None:
            await self._actor.stop()

    async def _watch(self, actor: ModelActor) -> None:
        await actor.ended.wait()
        self._over.set()
        if self._running is not None:
            self._running.cancel()

    async def until_ended(self) -> tuple[str, int | None] | None:
        """Wait until the replica has ended; return the failure of a GPU if it was the cause, else None."""
        await self._over.wait()
        failure = None if self._actor is None else self._actor.device_failure
        return None if failure is None else (failure.error, failure.gpu)

    # Jobs

    async def run(self, content: bytes) -> bytes:
        """Return the `JobAnswer`. See `Jobs.run`."""
        if self._jobs is None:
            return to_json(JobAnswer(None, "lost", "the replica was not started"))
        return to_json(await self._jobs.run(decode_request(content)))

    async def cancel(self, request_id: str, reason: str) -> None:
        if self._jobs is not None:
            self._jobs.cancel(request_id, reason)

    async def revoke_cancel(self, request_id: str) -> None:
        if self._jobs is not None:
            self._jobs.revoke_cancel(request_id)


def _refused(error: Exception) -> bytes:
    device = error.failure if isinstance(error, FailedDeviceError) else None
    return to_json(MoveAnswer(error=str(error), device=device))
