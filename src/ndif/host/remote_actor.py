"""A replica in a process of its own, which leaders of other processes call.

Leaders come and go; the replica and its jobs go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from ndif.host.jobs import Answer, Jobs, NodeServices
from ndif.host.port import ActorError, DeviceError, ModelActor
from ndif.stores.broker.encoding import decode_request
from ndif.stores.broker.port import BrokerError
from ndif.stores.objects import ObjectStoreError


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

    async def prepare(self) -> NodeServices:
        """Return what the replica works with on its node.

        Raises:
            ActorError: if this node is not set up for the replica.
        """
        raise NotImplementedError

    async def describe(self) -> Answer:
        """Return all that a leader needs to adopt the replica."""
        return {
            **self._said,
            "level": self._level,
            "moving": self._moving,
            "ended": self._over.is_set(),
            "model": dict(self._actor.model) if self._actor is not None else {},
            "requests": self._jobs.known if self._jobs is not None else [],
        }

    # Start, cache, stop

    async def start(self) -> Answer:
        """Load the model: COLD to HOT. Return the loaded `model`, or the `error`."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def _start(self) -> Answer:
        try:
            services = await self.prepare()
            self._actor, self._jobs = services.actor, Jobs(services)
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

    def _holds(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        self._said["place"]["gpu_mem_bytes_by_id"] = dict(gpu_mem_bytes_by_id)

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
        self._holds({})
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
        self._holds(gpu_mem_bytes_by_id)
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
