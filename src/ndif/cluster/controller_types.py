"""Types of the controller: its requests, its results, and the functions that it calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field

from ndif.cluster.models import Model
from ndif.host.evaluation import Measured
from ndif.host.port import ModelActor
from ndif.placement.demand import Demand, Device
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica, ReplicaKey
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import Variant

MakeActor = Callable[[DeploymentConfig, str, PlacedReplica], ModelActor]
"""Creates the actor of a replica with these settings, in the runtime of this generation, at this place."""

Evaluate = Callable[[DeploymentConfig, str], Awaitable[Measured]]
"""Measures one replica of a model; raises an `ActorError` if that fails."""

Discover = Callable[[], Awaitable[Sequence[Node]]]
"""Returns the nodes that exist now, each without replicas."""

Leaving = Callable[[ReplicaKey, str], None]
"""Called with each replica that no longer serves, and the reason."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A request for replicas of one model in one generation."""

    model: Model
    generation: str
    replicas: int
    gated: bool = False
    """True if a user who waits for the replicas may use gated models."""
    _withdrawals: int = field(init=False, repr=False)
    """Withdrawals of the model before this request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_withdrawals", self.model.withdrawals)

    @property
    def withdrawn(self) -> bool:
        """Return True if an operator has evicted the model since the request."""
        return self.model.withdrawals > self._withdrawals

    @property
    def void(self) -> bool:
        """Return True if the request was withdrawn, or its model turned out to be another model."""
        return self.withdrawn or self.model.same_as is not None

    @property
    def variant(self) -> Variant:
        """Return the model and generation."""
        return Variant(self.model.key, self.generation)

    @property
    def dedicated(self) -> bool:
        """Return True if the operator or the schedule dedicates every requested replica."""
        return 0 < self.replicas <= self.model.dedicated_in(self.generation)

    def demand(self, size_bytes: int, files_on: Set[str] = frozenset()) -> Demand:
        """Return the demand for replicas of this size whose files are on these nodes."""
        return Demand(
            str(self.variant),
            size_bytes,
            self.replicas,
            self.dedicated,
            _device(self.model.deployment.device),
            frozenset(files_on),
        )


@dataclass(frozen=True, slots=True)
class OrphanReplica:
    """A replica that an earlier controller left running."""

    placed: PlacedReplica
    config: DeploymentConfig
    actor: ModelActor
    is_loaded: bool
    """False while the replica loads."""


@dataclass(frozen=True, slots=True)
class ProvisionResult:
    """Result of a request for replicas."""

    replica_ids: tuple[str, ...] = ()
    """Replicas that exist now, ready or loading."""
    problem: str | None = None
    """Reason why fewer replicas exist than requested."""
    evicted: tuple[ReplicaKey, ...] = ()
    """Replicas evicted for this request and for requests of the same decision."""


def _device(device: str | None) -> Device:
    if device is None or device == "auto":
        return Device.AUTO
    return Device.CPU if device == "cpu" else Device.GPU
