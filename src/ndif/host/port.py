"""`ModelActor`, the interface of one replica, and the errors that its methods raise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ndif.host.device_errors import DeviceFailure
from ndif.runtime.messages import LoadedModel
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.structure import ModelStructure

Progress = Callable[[int, int], None]
"""Receives the bytes, or steps, that are done and their total."""

Respond = Callable[[Response], Awaitable[bool]]
"""Delivers one update; returns False if a live client did not receive it."""


@dataclass(frozen=True, slots=True)
class ServedModel(LoadedModel):
    """Facts about a loaded model, including facts that only the host knows."""

    repo_id: str | None = None
    """The repository's name as its hub spells it; None if no hub answered."""
    gated: bool = False
    """True if the hub serves its files to permitted accounts only."""
    structure: ModelStructure | None = None
    """The model's tree of modules; None if it could not be described."""
    files: str | None = None
    """Key of the object from which clients build the model (`ndif.host.snapshot`), once it is stored."""


class ReplicaLostError(Exception):
    """The replica can run no more requests; its request may run elsewhere."""


class ReplicaEvictedError(ReplicaLostError):
    """The replica was taken off its device in the middle of a job, through no fault of the job."""


class NotSharedError(Exception):
    """The shared forward pass did not answer the request, which must run alone."""


class EndedError(Exception):
    """The request had already ended when its replica was lost."""


class ActorError(Exception):
    """The replica cannot be loaded or moved back to its device; the message says why, in a sentence."""


class FailedDeviceError(ActorError):
    """The replica cannot be loaded or moved back because one of its GPUs failed."""

    def __init__(self, message: str, failure: DeviceFailure) -> None:
        super().__init__(message)
        self.failure = failure


class RequestRunner(Protocol):
    """A replica, or a place in its shared forward pass, that runs one request at a time."""

    async def run(self, request: Request, respond: Respond) -> Response:
        """Report DISPATCHED, run one request and return its terminal response; `respond` delivers updates.

        Raises:
            BrokerUnavailableError: if the payload could not be read, so that the request did not run.
            ClientLeftError: if the live client did not receive DISPATCHED; the request did not run.
            EndedError: if the request has ended already.
            NotSharedError: if this was a place in a shared forward pass, which did not answer the request.
            ReplicaLostError: if the replica ended, or was evicted.
        """

    def cancel(self, reason: str) -> None:
        """End the request that runs now as an ERROR with `reason`."""


class SharedPasses(Protocol):
    """Forward passes that trusted requests share on one replica."""

    @property
    def most(self) -> int:
        """Return the largest number of requests in one pass."""

    async def run(self, requests: Sequence[Request]) -> list[Response | None]:
        """Run trusted requests in one forward pass and return their responses; report no DISPATCHED.

        None means that the request must run alone, as if it had not been in the pass. Raise a
        `ReplicaLostError` if the replica ended, or was evicted.
        """


class ModelActor(RequestRunner, Protocol):
    """One replica of one model and generation: loaded once, HOT or WARM."""

    ended: asyncio.Event
    """Set once the replica has ended, for any reason."""

    @property
    def shared_passes(self) -> SharedPasses | None:
        """Return the forward passes that requests may share; None where each request runs alone."""

    @property
    def device_failure(self) -> DeviceFailure | None:
        """Return the failure of a GPU that ended the replica, once `ended` is set."""

    @property
    def model(self) -> ServedModel | None:
        """Return facts about the loaded model; None before it is loaded."""

    async def start(self, progress: Progress) -> None:
        """Load the model (COLD to HOT), or raise an `ActorError` and leave nothing of the replica."""

    async def to_cache(self) -> None:
        """Move the weights to CPU memory (HOT to WARM). The device is free when this returns.

        A `run` in progress raises a `ReplicaEvictedError`.
        """

    async def from_cache(self, gpu_mem_bytes_by_id: Mapping[int, int]) -> None:
        """Move the weights to these devices (WARM to HOT). Without devices the replica runs on the CPU.

        Raise an `ActorError` on failure; the caller must then stop the replica.
        """

    async def stop(self) -> None:
        """End the replica. A `run` in progress raises a `ReplicaEvictedError`."""
