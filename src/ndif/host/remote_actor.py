"""A replica for leaders in other processes: they come and go, and what it runs goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from ndif.host.jobs import Answer, Equipment, Jobs
from ndif.host.port import Actor, ActorError, DeviceError
from ndif.stores.broker.encoding import decode_request
from ndif.stores.broker.port import BrokerError
from ndif.stores.objects import ObjectStoreError


class Replica:
    """One `Actor` beside the stores of its node."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        """`said`: what whoever made it says of it, for whoever leads next; of that its `place` changes."""
        self._said = {**said, "place": dict(said["place"])}
        self._actor: Actor | None = None
        self._jobs: Jobs | None = None
        self._starting: asyncio.Task[Answer] | None = None
        self._progress = (0, 0)
        self._progressed = asyncio.Event()
        self._over = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._attending: asyncio.Task[None] | None = None
        self._level: str | None = None
        self._moving = False

    async def prepare(self) -> Equipment:
        """What it needs.

        Raises:
            ActorError: if this node is not set up for it.
        """
        raise NotImplementedError

    async def describe(self) -> Answer:
        """All that a leader needs who finds it."""
        return {
            **self._said,
            "level": self._level,
            "moving": self._moving,
            "ended": self._over.is_set(),
            "model": dict(self._actor.model) if self._actor is not None else {},
            "requests": self._jobs.known if self._jobs is not None else [],
        }

    # Its life

    async def start(self) -> Answer:
        """COLD to HOT: the loaded `model`, or the `error`."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def _start(self) -> Answer:
        try:
            equipment = await self.prepare()
            self._actor, self._jobs = equipment.actor, Jobs(equipment)
            self._watching = asyncio.create_task(self._watch(self._actor), name="end")
            if self._over.is_set():
                raise ActorError("the replica was ended before it was loaded")  # noqa: TRY301
            await self._actor.start(self._note)
            self._attending = asyncio.create_task(self._jobs.attend(), name="jobs")
        except (ActorError, BrokerError, ObjectStoreError) as error:
            self._over.set()
            return _refused(error)
        finally:
            self._progressed.set()
        return self._came_up(self._actor)

    def _came_up(self, actor: Actor) -> Answer:
        self._level, self._said["place"]["deployed"] = "HOT", time.time()
        return {"model": dict(actor.model)}

    def _holds(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        self._said["place"]["gpu_mem_bytes_by_id"] = dict(gpu_mem_bytes_by_id)

    def _note(self, done: int, total: int) -> None:
        self._progress = done, total
        self._progressed.set()

    async def progress(self, known: tuple[int, int]) -> tuple[int, int]:
        """What is loaded and all there is to load, once it is not what is `known`."""
        while self._progress == tuple(known):
            self._progressed.clear()
            await self._progressed.wait()
        return self._progress

    async def to_cache(self) -> None:
        """HOT to WARM. See `Actor.to_cache`."""
        if self._actor is None or self._level == "WARM":
            return
        self._moving = True
        await self._actor.to_cache()
        self._holds({})
        self._level, self._moving = "WARM", False

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> Answer:
        """WARM to HOT: the loaded `model`, or the `error`. See `Actor.from_cache`."""
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
        """End it. A request that runs is evicted."""
        self._over.set()
        if self._actor is not None:
            await self._actor.stop()

    async def _watch(self, actor: Actor) -> None:
        await actor.ended.wait()
        self._over.set()
        if self._attending is not None:
            self._attending.cancel()

    async def until_ended(self) -> tuple[str, int | None] | None:
        """Return once it is good for nothing any more: with the failure of a GPU, if that ended it."""
        await self._over.wait()
        failure = None if self._actor is None else self._actor.device_failure
        return None if failure is None else (failure.error, failure.gpu)

    # Its requests

    async def run(self, content: bytes, *, inherited: bool = False) -> Answer:
        """Bring a request to its end. See `Jobs.run`."""
        if self._jobs is None:
            return {"lost": "the replica was not started"}
        return await self._jobs.run(decode_request(content), inherited=inherited)

    async def cancel(self, request_id: str, reason: str) -> None:
        """End a request. See `Jobs.cancel`."""
        if self._jobs is not None:
            self._jobs.cancel(request_id, reason)

    async def spare(self, request_id: str) -> None:
        """Do not end a request that is not here yet, whatever was said of it."""
        if self._jobs is not None:
            self._jobs.spare(request_id)


def _refused(error: Exception) -> Answer:
    """Say why it is not HOT, and which GPU is to blame, if one is."""
    if not isinstance(error, DeviceError):
        return {"error": str(error)}
    return {"error": str(error), "device": [error.failure.error, error.failure.gpu]}
