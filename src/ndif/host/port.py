"""What the cluster asks of one replica, whatever carries it out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from ndif.host.device_errors import DeviceFailure
from ndif.schema.request import Request
from ndif.schema.response import Response

Progress = Callable[[int, int], None]
"""Called with the bytes, or steps, that are done and all there are."""

Respond = Callable[[Response], Awaitable[bool]]
"""Delivers one update; whether anybody waits for it."""


class ReplicaLostError(Exception):
    """The replica can run nothing more; what it was running may run elsewhere."""


class ReplicaEvictedError(ReplicaLostError):
    """The replica was taken off its device in the middle of a job: no fault of the job's."""


class EndedError(Exception):
    """A request has had its last response already, by a replica that was lost after that."""


class ActorError(Exception):
    """The replica cannot be brought up, or back; the message says why, in a sentence."""


class DeviceError(ActorError):
    """The replica cannot be brought up, or back, because one of its GPUs has failed."""

    def __init__(self, message: str, failure: DeviceFailure) -> None:
        super().__init__(message)
        self.failure = failure


class Actor(Protocol):
    """One replica of one model in one runtime: loaded once, HOT or WARM, one request at a time."""

    ended: asyncio.Event
    """Set once it is gone for good, whoever ended it."""

    @property
    def device_failure(self) -> DeviceFailure | None:
        """The failure of a GPU that ended it, once `ended` is set."""
        ...

    @property
    def model(self) -> Mapping[str, Any]:
        """What was loaded: class, parameters, dtype, device, task, folder, repo_id. Empty before.

        `files`: where among the objects is what clients build it from (`ndif.host.snapshot`).
        """
        ...

    async def start(self, progress: Progress) -> None:
        """COLD to HOT.

        Raises:
            DeviceError: if a GPU has failed.
            ActorError: if it cannot be loaded. Nothing is left of it then.
        """
        ...

    async def to_cache(self) -> None:
        """HOT to WARM: the device is free when this returns, and the weights are in the CPU's memory.

        A request that runs is ended: its call raises `ReplicaEvictedError`.
        """
        ...

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        """WARM to HOT, on these devices; on the CPU if there are none.

        Raises:
            DeviceError: if a GPU has failed.
            ActorError: if it cannot. It is good for nothing then, and the caller ends it.
        """
        ...

    async def stop(self) -> None:
        """End it. A request that runs raises `ReplicaEvictedError`."""
        ...

    async def __call__(self, request: Request, respond: Respond) -> Response:
        """Announce one request and run it; its last response is returned, `respond` has those before it.

        Raises:
            ClientLeftError: if its client is not there to hear of it.
            EndedError: if there is nothing to be run any more.
            ReplicaLostError: if the replica ended, or was evicted.
        """
        ...

    def cancel(self, reason: str) -> None:
        """End what is running now; its request becomes an ERROR with `reason`."""
        ...
