"""What the controller is asked for, what it asks of others, and what comes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from ndif.cluster.deployment import Deployment, ReplicaKey
from ndif.cluster.models import Model
from ndif.cluster.node import Node
from ndif.cluster.wanted import Device, Wanted
from ndif.host.port import Actor
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.variant import Variant

MakeActor = Callable[[DeploymentConfig, str, Deployment], Actor]
"""A replica's actor: of this model, in the runtime of this generation, at this place."""

Evaluate = Callable[[DeploymentConfig, str], Awaitable["Measured"]]
"""What one replica of it needs; raises `ActorError` if it cannot be told."""

Discover = Callable[[], Awaitable[Sequence[Node]]]
"""The machines as they are now, each without replicas."""

Leaving = Callable[[ReplicaKey, str], None]
"""Told of each replica that no longer serves, and why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What can be known of a model before it is loaded."""

    size_bytes: int
    """What one replica needs, padding and all."""
    task: str | None = None
    repo_id: str | None = None
    """Its name as a hub spells it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """So many replicas of one model in one runtime."""

    model: Model
    generation: str
    replicas: int
    _withdrawals: int = field(init=False, repr=False)
    """Of the model, until it was asked for."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_withdrawals", self.model.withdrawals)

    @property
    def withdrawn(self) -> bool:
        """Whether the model's operator has taken it away since."""
        return self.model.withdrawals > self._withdrawals

    @property
    def void(self) -> bool:
        """Whether nothing is to come of it: it was withdrawn, or its model turned out to be another."""
        return self.withdrawn or self.model.same_as is not None

    @property
    def variant(self) -> Variant:
        """What is asked for."""
        return Variant(self.model.key, self.generation)

    @property
    def dedicated(self) -> bool:
        """Whether it is no more than what its operator dedicates: what users need beyond has to wait."""
        return 0 < self.replicas <= self.model.dedicated_in(self.generation)

    def wanted(self, size_bytes: int) -> Wanted:
        """It, where one replica needs so much."""
        device = _device(self.model.wanted.device)
        return Wanted(str(self.variant), size_bytes, self.replicas, self.dedicated, device)


@dataclass(frozen=True, slots=True)
class Living:
    """A replica that another controller had, and left."""

    deployment: Deployment
    config: DeploymentConfig
    """What it was loaded as."""
    actor: Actor
    is_loaded: bool
    """Or else it is on its way."""


@dataclass(frozen=True, slots=True)
class Provided:
    """What came of asking."""

    replica_ids: tuple[str, ...] = ()
    """The replicas that there are now, ready or on their way."""
    problem: str | None = None
    """Why there are not as many as were asked for."""
    evicted: tuple[ReplicaKey, ...] = ()
    """Whoever had to go for them, and for what else was asked for with them."""


def _device(device: str | None) -> Device:
    """What kind of device a torch device's name means."""
    if device is None or device == "auto":
        return Device.AUTO
    return Device.CPU if device == "cpu" else Device.GPU
