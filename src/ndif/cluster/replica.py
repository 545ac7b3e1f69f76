"""A replica that exists or is being created: its place, its actor and its users."""

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
    """The model cannot be served; the message says why."""


class EvictedError(DeploymentError):
    """The replica was evicted before it could serve; another may be created."""


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
    """Bytes loaded and bytes in total, while it loads."""
    starting: asyncio.Task[None] | None = None
    is_ending: bool = False
    is_loaded: bool = False
    """True once it has been up, so that there is something to keep WARM."""
    lease: Lease = field(default_factory=Lease)
    used: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it was used since it came up, or can no longer be."""
    _up: asyncio.Future[None] = field(default_factory=lambda: _future())

    @property
    def generation(self) -> str:
        """Return the nnsight generation that it runs."""
        return Variant.parse(self.placed.model_key).generation

    @property
    def state(self) -> ReplicaState:
        """Return the state that a request meets now."""
        if self.placed.level is not DeploymentLevel.HOT:
            return ReplicaState.NOT_STARTED
        if self.actor.ended.is_set() or (self._up.done() and not self.is_up):
            return ReplicaState.UNHEALTHY
        return ReplicaState.RUNNING if self.is_up else ReplicaState.DEPLOYING

    @property
    def serving(self) -> bool:
        """Return True if it is HOT and can run a request."""
        return self.placed.level is DeploymentLevel.HOT and self.is_up

    @property
    def is_up(self) -> bool:
        """Return True if its weights are in memory, on either level."""
        is_up = self._up.done() and self._up.exception() is None
        return is_up and not self.actor.ended.is_set()

    @property
    def is_pending(self) -> bool:
        """Return True while it is loading or returning to its device."""
        return not self._up.done()

    async def up(self) -> None:
        """Return once it can run a request; raise a `DeploymentError` if it never can."""
        await asyncio.shield(self._up)

    def returns(self, placed: PlacedReplica) -> None:
        """Prepare for its return to the device at this place."""
        self.placed, self.lease = placed, Lease()
        if self._up.done():
            self.used.set()  # decisions that wait for its place are made again
            self._up, self.used = _future(), asyncio.Event()

    def progressed(self, loaded: int, total: int) -> None:
        """Record how much is loaded."""
        self.progress = loaded, total

    def came_up(self) -> None:
        """Record that it can run requests."""
        self.progress = None
        self.is_loaded = True
        if not self._up.done():
            self._up.set_result(None)

    def failed(self, error: DeploymentError) -> None:
        """Record that it cannot be loaded."""
        self.used.set()
        if not self._up.done():
            self._up.set_exception(error)

    def mark_used(self) -> None:
        """Record that it has run a request, or had none to run, since it came up."""
        self.used.set()


def _future() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    # A failure without a waiter is no defect.
    future.add_done_callback(lambda completed: completed.cancelled() or completed.exception())
    return future
