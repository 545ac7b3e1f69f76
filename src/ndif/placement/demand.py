"""Inputs of placement: the demand for replicas of a model, and the rules of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Device(str, Enum):
    """Kind of device for a model."""

    CPU = "cpu"
    GPU = "gpu"
    AUTO = "auto"
    """GPUs, with evictions if necessary; the CPU if no GPU can be freed."""


_ON_CPU = {Device.GPU: (False,), Device.CPU: (True,), Device.AUTO: (False, True)}


@dataclass(frozen=True, slots=True)
class Demand:
    """A number of replicas of one model."""

    model_key: str
    size_bytes: int
    """Bytes of one replica, padding included."""
    replicas: int = 1
    """Total number of replicas. If more exist, no replica is ended."""
    dedicated: bool = False
    """True if no other model evicts the model, and the model may evict protected replicas."""
    device: Device = Device.AUTO
    files_on: frozenset[str] = frozenset()
    """Ids of nodes that have the model's files, which are preferred in ties."""

    def __post_init__(self) -> None:
        if self.size_bytes < 1:
            raise ValueError(f"{self.model_key} must need at least one byte.")
        if self.replicas < 0:
            raise ValueError(f"{self.model_key} cannot have {self.replicas} replicas.")

    @property
    def on_cpu(self) -> tuple[bool, ...]:
        """Return the acceptable kinds of device, best first: True for the CPU, False for GPUs."""
        return _ON_CPU[self.device]


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """Rules of placement for all nodes and decisions of a cluster."""

    gpu_fraction_factor: float = 3.0
    """A model shares a GPU if this many models of its size fit on it; otherwise it gets whole GPUs."""
    fraction_largest_possible: float = 0.8
    """Maximum fraction of a shared GPU that all its replicas take together."""
    min_available_gpu_fraction: float = 0.3
    """Minimum free fraction of a GPU that takes another replica."""
    minimum_deployment_time_s: float = 3600.0
    """Seconds for which a replica is HOT before another model may evict it."""
    drain_s: float = 60.0
    """Seconds for which an evicted replica may finish its requests."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction_largest_possible < 1:
            raise ValueError("fraction_largest_possible must lie between 0 and 1.")
        if not 0 <= self.min_available_gpu_fraction <= 1:
            raise ValueError("min_available_gpu_fraction must lie between 0 and 1.")
        # Otherwise the two rules could disagree on whether a model shares an empty GPU.
        if self.gpu_fraction_factor * self.fraction_largest_possible < 1:
            raise ValueError("gpu_fraction_factor must be at least 1 / fraction_largest_possible.")
        if self.minimum_deployment_time_s < 0:
            raise ValueError("minimum_deployment_time_s must not be negative.")

    def largest_share(self, total_bytes: int, free_bytes: int) -> int:
        """Return the largest model that may share a GPU with `free_bytes` free; 0 if none may."""
        if free_bytes < self.min_available_gpu_fraction * total_bytes:
            return 0
        left = int(self.fraction_largest_possible * total_bytes) - (total_bytes - free_bytes)
        return max(0, min(left, int(total_bytes / self.gpu_fraction_factor)))

    def evictable_until(self, now: float, *, dedicated: bool) -> float:
        """Return the latest time at which an evictable replica became HOT; inf for a dedicated model."""
        return math.inf if dedicated else now - self.minimum_deployment_time_s


DEFAULT_RULES = PlacementRules()
