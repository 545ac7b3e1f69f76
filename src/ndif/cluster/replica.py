"""A replica that exists or is being created, with its place, its actor and its lease."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ndif.cluster.models import Model
from ndif.errors import NdifError
from ndif.host.port import ModelActor
from ndif.placement.replica import PlacedReplica
from ndif.schema.model_key import Variant
from ndif.schema.states import DeploymentLevel, ReplicaState


class DeploymentError(NdifError):
    """The model cannot be served; the message is the reason."""


class EvictedError(DeploymentError):
    """The replica was evicted or lost; another replica may be created."""


class Lease:
    """Count of the workers that run requests on a replica, until it leaves its device."""

    def __init__(self) -> None:
        self._holders = 0
        self._free = asyncio.Event()
        self._free.set()

    def __enter__(self) -> None:
        self._holders += 1
        self._free.clear()

    def __exit__(self, *_: object) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._free.set()

    async def ended(self) -> None:
        """Return once no worker holds the lease, so that no request runs."""
        await self._free.wait()


@dataclass(eq=False)
class Replica:
    """One replica, from the decision to create it until it has ended.

    Owns its state and its lease. The controller creates and ends it, a processor runs requests on its
    actor, and `placed` is its record in the cluster.
    """

    placed: PlacedReplica
    model: Model
    actor: ModelActor
    progress: tuple[int, int] | None = None
    """Loaded bytes and total bytes while the replica loads."""
    starting: asyncio.Task[None] | None = None
    is_ending: bool = False
    is_loaded: bool = False
    """True once the replica has been up, so that its weights can be kept WARM."""
    lease: Lease = field(default_factory=Lease)
    used: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the replica has been used since it came up, or can no longer be used."""
    _up: asyncio.Future[None] = field(default_factory=lambda: _future())

    @property
    def generation(self) -> str:
        """Return the replica's nnsight generation."""
        return Variant.parse(self.placed.model_key).generation

    @property
    def state(self) -> ReplicaState:
        """Return the current state for requests."""
        if self.placed.level is not DeploymentLevel.HOT:
            return ReplicaState.NOT_STARTED
        if self.actor.ended.is_set() or (self._up.done() and not self.is_up):
            return ReplicaState.UNHEALTHY
        return ReplicaState.RUNNING if self.is_up else ReplicaState.DEPLOYING

    @property
    def serving(self) -> bool:
        """Return True if the replica is HOT and can run a request."""
        return self.placed.level is DeploymentLevel.HOT and self.is_up

    @property
    def is_up(self) -> bool:
        """Return True if the replica's weights are in memory, HOT or WARM."""
        is_up = self._up.done() and self._up.exception() is None
        return is_up and not self.actor.ended.is_set()

    @property
    def is_pending(self) -> bool:
        """Return True while the replica loads or returns to its device."""
        return not self._up.done()

    async def up(self) -> None:
        """Wait until the replica can run a request; raise a `DeploymentError` if it never can."""
        await asyncio.shield(self._up)

    def prepare_return(self, placed: PlacedReplica) -> None:
        """Prepare for the return to a device at this place."""
        self.placed, self.lease = placed, Lease()
        if self._up.done():
            self.used.set()  # lets decisions that wait for its place be made again
            self._up, self.used = _future(), asyncio.Event()

    def record_progress(self, loaded: int, total: int) -> None:
        """Record the loaded bytes and the total."""
        self.progress = loaded, total

    def record_up(self) -> None:
        """Record that the replica can run requests."""
        self.progress = None
        self.is_loaded = True
        if not self._up.done():
            self._up.set_result(None)

    def record_failure(self, error: DeploymentError) -> None:
        """Record that the replica cannot serve."""
        self.used.set()
        if not self._up.done():
            self._up.set_exception(error)

    def mark_used(self) -> None:
        """Record that the replica has run a request since it came up, or had no request to run."""
        self.used.set()


def _future() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    # Retrieve the exception: a failure that no caller awaits is no defect.
    future.add_done_callback(lambda completed: completed.cancelled() or completed.exception())
    return future
