"""What is simulated: machines, models and how fast things go. Values alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ndif.cluster.node import Node
from ndif.cluster.rules import Rules
from ndif.queue.autoscale import Bounds
from ndif.queue.processor import Customs
from ndif.schema.deployment import DeploymentConfig

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Speeds:
    """How long what happens to a replica takes."""

    start_up_s: float = 15.0
    """From a decision to a process that begins to read its weights."""
    load_bytes_per_s: float = 2 * _GIB
    """COLD to HOT."""
    warm_bytes_per_s: float = 20 * _GIB
    """WARM to HOT."""
    cache_bytes_per_s: float = 20 * _GIB
    """HOT to WARM."""
    cpu_slowdown: float = 20.0
    """How many times longer a request runs on a replica without GPUs."""

    def __post_init__(self) -> None:
        rates = self.load_bytes_per_s, self.warm_bytes_per_s, self.cache_bytes_per_s
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError("speeds must be more than 0 bytes a second, and finite")
        if not 0 <= self.start_up_s < math.inf:
            raise ValueError("start_up must be at least 0 seconds, and finite")
        if not 1 <= self.cpu_slowdown < math.inf:
            raise ValueError("cpu_slowdown must be at least 1, and finite")

    def loading_s(self, size_bytes: int) -> float:
        """Seconds that a replica needs until it can run a request, where there was none."""
        return self.start_up_s + size_bytes / self.load_bytes_per_s

    def returning_s(self, size_bytes: int) -> float:
        """Seconds that a WARM replica needs until it can."""
        return size_bytes / self.warm_bytes_per_s

    def caching_s(self, size_bytes: int) -> float:
        """Seconds until the device of a HOT replica that becomes WARM is free."""
        return size_bytes / self.cache_bytes_per_s


@dataclass(frozen=True, slots=True)
class World:
    """The cluster of a simulation, before anything is on it."""

    nodes: tuple[Node, ...]
    models: tuple[DeploymentConfig, ...] = ()
    """Those of which the operator has said more than a size. Dedicated ones are deployed at once."""
    names: tuple[str, ...] = ()
    """Repo ids of all models whose size is known, as the file has them."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of their weights, by repo id in small letters."""
    default_size_bytes: int | None = None
    """Of models that `sizes` does not have; None: there may be none."""
    rules: Rules = field(default_factory=Rules)
    drain_s: float = 60.0
    """How long a replica that has to go may run on what it is running."""
    speeds: Speeds = field(default_factory=Speeds)
    autoscale: Bounds = field(default_factory=lambda: Bounds(most=4))
    customs: Customs = field(default_factory=Customs)
    execution_timeout_s: float = 3600.0
    """After so long a request is an ERROR, unless its model has a time of its own."""

    def weights(self, repo_id: str) -> int | None:
        """Bytes of a model's weights; None where nothing says."""
        return self.sizes.get(repo_id.lower(), self.default_size_bytes)

    def replica_bytes(self, config: DeploymentConfig) -> int | None:
        """What one replica takes, padding and all."""
        weights = self.weights(config.repo_id)
        if weights is None:
            return None
        return max(math.ceil(weights * (1 + config.padding_factor)) + config.padding_bytes, 1)
