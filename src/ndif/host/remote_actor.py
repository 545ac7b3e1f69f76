"""A replica in a process of its own, and its jobs, for which leaders of other processes ask.

Leaders come and go; the replica and its jobs go on. Whichever process leads asks for a job, by a call or
over the replica's job channel, and may ask twice. No update and no result passes through the leader: the
answer is a few words that may be lost without harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ndif.host.port import (
    ActorError,
    DeviceError,
    EndedError,
    ModelActor,
    ReplicaEvictedError,
    ReplicaLostError,
)
from ndif.host.request_lifecycle import Party, RequestLifecycle
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker.encoding import decode_request
from ndif.stores.broker.port import Broker, BrokerAwayError, BrokerError, ClientLeftError
from ndif.stores.broker.signing import PROTOCOL
from ndif.stores.objects import ObjectStoreError
from ndif.stores.responder import Responder

if TYPE_CHECKING:
    # Only a node of a cluster has a client of Redis.
    from ndif.stores.broker.redis.job_channels import Introduction, JobReceiver

Answer = dict[str, Any]

_EARLY = 1000
"""Cancelled jobs that a replica remembers before they come."""
_LOOK_S = 1.0
_DESCRIPTION = 200
"""Characters of a response's description that an answer has."""


class NodeServices(NamedTuple):
    """The actor, not started yet, the stores and the job channel of a replica on its node."""

    actor: ModelActor
    broker: Broker
    responder: Responder
    channel: JobReceiver


class Jobs:
    """The jobs that one replica was sent.

    Runs them in turn on the replica's `ModelActor`, leaves their states and ends to a
    `RequestLifecycle`, and answers the leader. Which job comes next is the leader's choice.
    """

    def __init__(self, services: NodeServices, replica_id: str = "") -> None:
        """Run jobs with these services; `replica_id` names the replica in the log."""
        self._name = replica_id
        self._actor = services.actor
        self._channel = services.channel
        self._lifecycle = RequestLifecycle(services.broker, services.responder, Party.REPLICA)
        self._turn = asyncio.Lock()
        self._current: Request | None = None
        self._runs: dict[str, asyncio.Task[Answer]] = {}
        self._cancelled_early: dict[str, str] = {}

    @property
    def known(self) -> list[str]:
        """Ids of the jobs that run, wait, or ended not long ago."""
        return [*self._runs, *self._lifecycle.remembered]

    async def run(self, request: Request) -> Answer:
        """Run a job to its end and return that end, or `lost`, `evicted` or `away` with the reason.

        A job that runs already, or has ended, does not run again. A job that comes meanwhile waits.
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
        """End a job that runs, waits or is still to come; it becomes an ERROR with `reason`."""
        if self._lifecycle.cancel(request_id, reason) or self._lifecycle.end_of(request_id):
            return
        self._cancelled_early[request_id] = reason
        if len(self._cancelled_early) > _EARLY:
            del self._cancelled_early[next(iter(self._cancelled_early))]

    def revoke_cancel(self, request_id: str) -> None:
        """Run a job when it comes, although it was cancelled before."""
        self._cancelled_early.pop(request_id, None)

    async def _run_or_give_back(self, request: Request) -> None:
        answer = await self.run(request)
        if "status" not in answer:
            await self._channel.give_back(request)

    async def _run(self, request: Request) -> Answer:
        self._lifecycle.claim(request)
        if (reason := self._cancelled_early.pop(request.id, None)) is not None:
            self._lifecycle.cancel(request.id, reason)
        watching = asyncio.create_task(self._watch_current(), name="client of the current job")
        try:
            async with self._turn:
                watching.cancel()
                return await self._execute(request)
        finally:
            watching.cancel()
            del self._runs[request.id]

    async def _watch_current(self) -> None:
        """Cancel the job that runs once its client has left: its leader, who would do so, may be gone."""
        while True:
            current = self._current
            if current is not None and await self._lifecycle.disconnected([current]):
                self.cancel(current.id, "The client left.")
            await asyncio.sleep(_LOOK_S)

    async def _execute(self, request: Request) -> Answer:
        self._current = request
        try:
            response = await self._lifecycle.dispatch(request, self._actor, self._name)
        except BrokerAwayError as error:
            await self._lifecycle.give_back(request)
            return {"away": str(error)}
        except (ClientLeftError, EndedError, ReplicaLostError) as error:
            await self._lifecycle.give_back(request)
            kind = "evicted" if isinstance(error, ReplicaEvictedError) else "lost"
            return {kind: str(error)}
        finally:
            self._current = None
        return _answer(await self._lifecycle.complete(request, response))


def _answer(end: Response) -> Answer:
    return {
        "status": end.status.value,
        "description": end.description[:_DESCRIPTION],
        "delivered": end.delivered,
        "execution_time": end.execution_s,
        "peak_memory": end.peak_memory,
        "result_bytes": end.result_bytes,
        "limit": end.limit,
        "steps": [[*step] for step in end.steps],
    }


class RemoteActor:
    """Serve one `ModelActor` to whichever process leads.

    Each method may be called twice, by one leader or by two, and acts once. Answers are plain data. `Jobs`
    runs the requests.
    """

    def __init__(self, said: Mapping[str, Any]) -> None:
        """Take the description that the next leader is to find; its `place` changes with the replica."""
        self._said = {**said, "place": dict(said["place"])}
        self._actor: ModelActor | None = None
        self._jobs: Jobs | None = None
        self._starting: asyncio.Task[Answer] | None = None
        self._progress = (0, 0)
        self._progressed = asyncio.Event()
        self._over = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._level: str | None = None
        self._moving = False
        self._channel: JobReceiver | None = None
        self._leader: Introduction | None = None

    async def prepare(self) -> NodeServices:
        """Return what the replica works with on its node, or raise an `ActorError`."""
        raise NotImplementedError

    async def fetch(self) -> str | None:
        """Download the model's files to the node; return the reason why that failed, if it did."""
        raise NotImplementedError

    async def describe(self) -> Answer:
        """Return all that a leader needs to adopt the replica."""
        return {
            **self._said,
            "protocol": PROTOCOL,
            "level": self._level,
            "moving": self._moving,
            "ended": self._over.is_set(),
            "model": dict(self._actor.model) if self._actor is not None else {},
            "requests": self._jobs.known if self._jobs is not None else [],
        }

    async def follow(self, leader: Introduction) -> None:
        """Believe the process that leads now, and take the jobs that it sends.

        A call and no argument of the constructor, which Ray's head keeps, perhaps in Redis.
        """
        self._leader = leader
        if self._channel is not None:
            self._channel.take_from(leader)

    # Start, cache, stop

    async def start(self) -> Answer:
        """Load the model: COLD to HOT. Return the loaded `model`, or the `error`."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def _start(self) -> Answer:
        try:
            services = await self.prepare()
            self._actor, self._jobs = (
                services.actor,
                Jobs(services, self._said["place"]["replica_id"]),
            )
            self._channel = services.channel
            if self._leader is not None:  # perhaps another one by now
                self._channel.take_from(self._leader)
            self._watching = asyncio.create_task(self._watch(self._actor), name="end")
            if self._over.is_set():
                raise ActorError("the replica was ended before it was loaded")  # noqa: TRY301
            await self._actor.start(self._note)
            self._running = asyncio.create_task(self._jobs.run_from_channel(), name="jobs")
        except (ActorError, BrokerError, ObjectStoreError) as error:
            self._over.set()
            return _refused(error)
        finally:
            self._progressed.set()
        return self._came_up(self._actor)

    def _came_up(self, actor: ModelActor) -> Answer:
        self._level, self._said["place"]["deployed"] = "HOT", time.time()
        return {"model": dict(actor.model)}

    def _note(self, done: int, total: int) -> None:
        self._progress = done, total
        self._progressed.set()

    async def progress(self, known: tuple[int, int]) -> tuple[int, int]:
        """Return the loaded bytes and their total, once they differ from what is `known`."""
        while self._progress == tuple(known):
            self._progressed.clear()
            await self._progressed.wait()
        return self._progress

    async def to_cache(self) -> None:
        """See `ModelActor.to_cache`."""
        if self._actor is None or self._level == "WARM":
            return
        self._moving = True
        await self._actor.to_cache()
        self._said["place"]["gpu_mem_bytes_by_id"] = {}
        self._level, self._moving = "WARM", False

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> Answer:
        """Return the loaded `model`, or the `error`. See `ModelActor.from_cache`."""
        if self._actor is None:
            return {"error": "the replica was not started"}
        if self._level == "HOT":
            return {"model": dict(self._actor.model)}
        self._moving = True
        try:
            await self._actor.from_cache(gpu_mem_bytes_by_id)
        except ActorError as error:
            return _refused(error)
        self._said["place"]["gpu_mem_bytes_by_id"] = dict(gpu_mem_bytes_by_id)
        self._moving = False
        return self._came_up(self._actor)

    async def stop(self) -> None:
        """See `ModelActor.stop`."""
        self._over.set()
        if self._actor is not None:
            await self._actor.stop()

    async def _watch(self, actor: ModelActor) -> None:
        await actor.ended.wait()
        self._over.set()
        if self._running is not None:
            self._running.cancel()

    async def until_ended(self) -> tuple[str, int | None] | None:
        """Return once the replica has ended: the failure of a GPU if that ended it, else None."""
        await self._over.wait()
        failure = None if self._actor is None else self._actor.device_failure
        return None if failure is None else (failure.error, failure.gpu)

    # Jobs

    async def run(self, content: bytes) -> Answer:
        """See `Jobs.run`."""
        if self._jobs is None:
            return {"lost": "the replica was not started"}
        return await self._jobs.run(decode_request(content))

    async def cancel(self, request_id: str, reason: str) -> None:
        """See `Jobs.cancel`."""
        if self._jobs is not None:
            self._jobs.cancel(request_id, reason)

    async def revoke_cancel(self, request_id: str) -> None:
        """See `Jobs.revoke_cancel`."""
        if self._jobs is not None:
            self._jobs.revoke_cancel(request_id)


def _refused(error: Exception) -> Answer:
    """Return the answer that a replica is not HOT: the error, and the GPU that caused it, if one did."""
    if not isinstance(error, DeviceError):
        return {"error": str(error)}
    return {"error": str(error), "device": [error.failure.error, error.failure.gpu]}
