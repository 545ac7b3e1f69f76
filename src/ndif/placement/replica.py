"""The record of one replica: its model, its place and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from ndif.schema.states import DeploymentLevel


class CandidateLevel(IntEnum):
    """Cost of placing a replica on a node; the lowest level wins."""

    DEPLOYED = 0
    """The replica is already HOT on the node."""
    CACHED_AND_FREE = 1
    """The replica is WARM on the node, and it fits without evictions."""
    FREE = 2
    """A new replica fits without evictions."""
    CACHED_AND_FULL = 3
    """The replica is WARM on the node, and other replicas must be evicted."""
    FULL = 4
    """A new replica fits if other replicas are evicted."""
    CANT_ACCOMMODATE = 5
    """The replica does not fit, even after every permitted eviction."""


ReplicaKey = tuple[str, str]
"""Model key and replica id, unique in the cluster."""


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One replica of one model on one node, with its memory there.

    A HOT replica on GPUs holds `gpu_mem_bytes_by_id`, CUDA contexts included. A WARM replica holds
    `size_bytes` of the node's CPU memory. A replica that runs on the CPU holds `size_bytes` of CPU memory
    at both levels, because its weights do not move.
    """

    model_key: str
    replica_id: str
    node_id: str
    level: DeploymentLevel
    size_bytes: int
    deployed: float
    """Unix time at which the replica last became HOT."""
    gpu_mem_bytes_by_id: Mapping[int, int] = field(default_factory=dict)
    gpu_memory_fraction: float | None = None
    """Fraction of a shared GPU; None if the replica has no shared GPU."""
    dedicated: bool = False
    on_cpu: bool = False

    @property
    def key(self) -> ReplicaKey:
        """Return the replica's key, unique in the cluster."""
        return self.model_key, self.replica_id

    @property
    def name(self) -> str:
        """Return the name of the replica's actor."""
        return f"ModelActor:{self.model_key}:{self.replica_id}"

    @property
    def cpu_bytes(self) -> int:
        """Return the bytes of the node's CPU memory that the replica holds."""
        return self.size_bytes if self.on_cpu or self.level is DeploymentLevel.WARM else 0

    def as_warm(self) -> PlacedReplica:
        """Return the replica as WARM: not dedicated, and without GPUs."""
        return replace(
            self,
            level=DeploymentLevel.WARM,
            gpu_mem_bytes_by_id={},
            gpu_memory_fraction=None,
            dedicated=False,
        )

    def has_same_place(self, other: PlacedReplica) -> bool:
        """Return True if both replicas hold the same memory of the same node, at the same level."""
        return (
            self.node_id == other.node_id
            and self.level is other.level
            and self.on_cpu == other.on_cpu
            and self.gpu_mem_bytes_by_id == other.gpu_mem_bytes_by_id
            and self.gpu_memory_fraction == other.gpu_memory_fraction
        )
