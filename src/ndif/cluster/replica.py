"""A replica that exists: its place, the actor that carries it out, and who uses it."""

from __future__ import annotations

import asyncio
from enum import Enum

from ndif.cluster.deployment import Deployment
from ndif.cluster.level import DeploymentLevel
from ndif.cluster.models import Model
from ndif.host.port import Actor, Progress


class State(str, Enum):
    """A deployment's state, by the names that clients print."""

    NOT_STARTED = "NOT_STARTED"
    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    UNHEALTHY = "UNHEALTHY"


class DeploymentError(Exception):
    """The model cannot be served; the message says why."""


class EvictedError(DeploymentError):
    """The replica has to leave before it was there; another may come."""


class Lease:
    """Who runs requests on a replica, from when it comes up until it leaves its device."""

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
        """Return once nobody runs requests on it."""
        await self._free.wait()


class Hosted:
    """One replica, from the decision that it shall be until nothing is left of it."""

    def __init__(self, deployment: Deployment, model: Model, actor: Actor) -> None:
        self.deployment = deployment
        """Where it is, or is to be."""
        self.model = model
        self.actor = actor
        self.progress: tuple[int, int] | None = None
        """How much of it is loaded, while it is."""
        self.on_progress: Progress = lambda done, total: None
        self.starting: asyncio.Task[None] | None = None
        self.is_ending = False
        """Nothing is to be left of it."""
        self.is_loaded = False
        """Whether it has been up, so that there is something to keep warm."""
        self.lease = Lease()
        self._up: asyncio.Future[None] = _future()
        self._of_use = asyncio.Event()

    @property
    def state(self) -> State:
        """What becomes of a request that comes now."""
        if self.deployment.level is not DeploymentLevel.HOT:
            return State.NOT_STARTED
        if self.actor.ended.is_set() or (self._up.done() and self._up.exception() is not None):
            return State.UNHEALTHY
        return State.RUNNING if self.serving else State.DEPLOYING

    @property
    def serving(self) -> bool:
        """Whether it is HOT and can run a request."""
        return self.deployment.level is DeploymentLevel.HOT and self.is_up

    @property
    def is_up(self) -> bool:
        """Whether its weights are in memory, here or there."""
        is_up = self._up.done() and self._up.exception() is None
        return is_up and not self.actor.ended.is_set()

    @property
    def is_pending(self) -> bool:
        """Whether it is coming up, or returning."""
        return not self._up.done()

    @property
    def speaks_for_model(self) -> bool:
        """Whether its files are those that clients build the model from: a user's own revision is not."""
        return not (self.model.on_demand and self.model.config.revision)

    async def up(self) -> None:
        """Return once it can run a request.

        Raises:
            DeploymentError: if it never will.
        """
        await asyncio.shield(self._up)

    def returns(self, deployment: Deployment) -> None:
        """It is to be HOT again."""
        self.deployment, self.lease = deployment, Lease()
        if self._up.done():
            self._of_use.set()  # whoever waits for its place looks again
            self._up, self._of_use = _future(), asyncio.Event()

    def progressed(self, done: int, total: int) -> None:
        """So much of it is loaded."""
        self.progress = done, total
        self.on_progress(done, total)

    def came_up(self) -> None:
        """It can run requests."""
        self.progress = None
        self.is_loaded = True
        if not self._up.done():
            self._up.set_result(None)

    def failed(self, error: DeploymentError) -> None:
        """It cannot be had."""
        self._of_use.set()
        if not self._up.done():
            self._up.set_exception(error)

    def was_of_use(self) -> None:
        """It has run something, or found nothing to run, since it came up."""
        self._of_use.set()

    @property
    def is_early(self) -> bool:
        """Whether it has yet to be of use."""
        return not self._of_use.is_set()

    async def of_use(self) -> None:
        """Return once it was of use, or can no longer be."""
        await self._of_use.wait()


def _future() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    # A failure that nobody waits for is no defect.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
