"""What placement may do: the numbers that an operator may turn."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """The same for every node and every decision of a cluster."""

    gpu_fraction_factor: float = 3.0
    """A model shares a GPU if this many of its size would fit; otherwise it has GPUs of its own."""
    fraction_largest_possible: float = 0.8
    """What all that share a GPU may take of it together."""
    min_available_gpu_fraction: float = 0.3
    """A GPU with less than this free takes nobody else."""
    minimum_deployment_time_s: float = 3600.0
    """How long a replica is HOT before another may displace it."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction_largest_possible < 1:
            raise ValueError("fraction_largest_possible must lie between 0 and 1.")
        if not 0 <= self.min_available_gpu_fraction <= 1:
            raise ValueError("min_available_gpu_fraction must lie between 0 and 1.")
        # Or else a model could have a share of an empty GPU by one rule and not by the other.
        if self.gpu_fraction_factor * self.fraction_largest_possible < 1:
            raise ValueError("gpu_fraction_factor must be at least 1 / fraction_largest_possible.")
        if self.minimum_deployment_time_s < 0:
            raise ValueError("minimum_deployment_time_s must not be negative.")

    def largest_share(self, total_bytes: int, free_bytes: int) -> int:
        """The largest model that may yet share a GPU of which so much is free, in bytes; 0 for none."""
        if free_bytes < self.min_available_gpu_fraction * total_bytes:
            return 0
        left = int(self.fraction_largest_possible * total_bytes) - (total_bytes - free_bytes)
        return max(0, min(left, int(total_bytes / self.gpu_fraction_factor)))

    def displaces(self, now: float, *, dedicated: bool) -> float:
        """A newcomer may displace what became HOT up to this moment; a dedicated one, whatever it is."""
        return math.inf if dedicated else now - self.minimum_deployment_time_s


DEFAULT_RULES = Rules()
"""As the specification has them."""
