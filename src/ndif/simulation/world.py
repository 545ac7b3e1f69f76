"""The world of a simulation: machines, models and speeds, as values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ndif.placement.demand import PlacementRules
from ndif.placement.node import Node
from ndif.queue.autoscaler import Bounds
from ndif.queue.processor import QueuePolicy
from ndif.schema.deployment import DeploymentConfig

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Speeds:
    """Durations of the changes of a replica."""

    start_up_s: float = 15.0
    """Seconds from a decision until the process begins to read weights."""
    load_bytes_per_s: float = 2 * _GIB
    """Speed of COLD to HOT."""
    warm_bytes_per_s: float = 20 * _GIB
    """Speed of WARM to HOT."""
    cache_bytes_per_s: float = 20 * _GIB
    """Speed of HOT to WARM."""
    cpu_slowdown: float = 20.0
    """Factor by which requests run longer on a replica without GPUs."""

    def __post_init__(self) -> None:
        rates = self.load_bytes_per_s, self.warm_bytes_per_s, self.cache_bytes_per_s
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError("speeds must be more than 0 bytes a second, and finite")
        if not 0 <= self.start_up_s < math.inf:
            raise ValueError("start_up must be at least 0 seconds, and finite")
        if not 1 <= self.cpu_slowdown < math.inf:
            raise ValueError("cpu_slowdown must be at least 1, and finite")

    def loading_s(self, size_bytes: int) -> float:
        """Return the seconds until a new replica can run a request."""
        return self.start_up_s + size_bytes / self.load_bytes_per_s

    def returning_s(self, size_bytes: int) -> float:
        """Return the seconds until a WARM replica can run a request."""
        return size_bytes / self.warm_bytes_per_s

    def caching_s(self, size_bytes: int) -> float:
        """Return the seconds until a replica that becomes WARM has left its device."""
        return size_bytes / self.cache_bytes_per_s


@dataclass(frozen=True, slots=True)
class World:
    """The empty cluster of a simulation, with its models and rules."""

    nodes: tuple[Node, ...]
    models: tuple[DeploymentConfig, ...] = ()
    """Deployments by the operator. Dedicated ones are created at once."""
    names: tuple[str, ...] = ()
    """Repository ids of all models of known size, as written in the file."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of weights, by repository id in lower case."""
    default_size_bytes: int | None = None
    """Bytes of models that are not in `sizes`; None if every model must be."""
    rules: PlacementRules = field(default_factory=PlacementRules)
    drain_s: float = 60.0
    """Seconds that an evicted replica may finish its requests in."""
    speeds: Speeds = field(default_factory=Speeds)
    autoscale: Bounds = field(default_factory=lambda: Bounds(most=4))
    queue_policy: QueuePolicy = field(default_factory=QueuePolicy)
    execution_timeout_s: float = 3600.0
    """Seconds after which a request ends as ERROR, unless its model has its own limit."""

    def weights(self, repo_id: str) -> int | None:
        """Return the bytes of a model's weights; None if not known."""
        return self.sizes.get(repo_id.lower(), self.default_size_bytes)

    def replica_bytes(self, config: DeploymentConfig) -> int | None:
        """Return the bytes of one replica, padding included; None if not known."""
        weights = self.weights(config.repo_id)
        if weights is None:
            return None
        return max(math.ceil(weights * (1 + config.padding_factor)) + config.padding_bytes, 1)
