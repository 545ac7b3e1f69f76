"""The record of one replica: its model, its place and the memory that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from ndif.schema.states import DeploymentLevel


class CandidateLevel(IntEnum):
    """Cost of a replica on a node; the lowest level wins."""

    DEPLOYED = 0
    """The replica is HOT there."""
    CACHED_AND_FREE = 1
    """The replica is WARM there, and there is room."""
    FREE = 2
    """No replica is there, and there is room."""
    CACHED_AND_FULL = 3
    """The replica is WARM there, and others must be evicted."""
    FULL = 4
    """Other replicas must be evicted."""
    CANT_ACCOMMODATE = 5
    """No permitted eviction makes room."""


ReplicaKey = tuple[str, str]
"""Model key and replica id, unique in the cluster."""


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """One replica of one model on one node, and the memory that it holds there.

    A HOT replica on GPUs holds `gpu_mem_bytes_by_id`, CUDA contexts included. A WARM replica holds its size
    of the node's CPU memory. A replica that runs on the CPU holds its size of CPU memory at either level,
    because its weights do not move.
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
    """Fraction of a shared GPU; None if its GPUs are not shared, or it has none."""
    dedicated: bool = False
    on_cpu: bool = False

    @property
    def key(self) -> ReplicaKey:
        """Return the name of the replica in the cluster."""
        return self.model_key, self.replica_id

    @property
    def name(self) -> str:
        """Return the name of its actor."""
        return f"ModelActor:{self.model_key}:{self.replica_id}"

    @property
    def cpu_bytes(self) -> int:
        """Return the bytes that it holds of the node's CPU memory."""
        return self.size_bytes if self.on_cpu or self.level is DeploymentLevel.WARM else 0

    def as_warm(self) -> PlacedReplica:
        """Return the replica as WARM: not dedicated, and its GPUs free."""
        return replace(
            self,
            level=DeploymentLevel.WARM,
            gpu_mem_bytes_by_id={},
            gpu_memory_fraction=None,
            dedicated=False,
        )

    def has_same_place(self, other: PlacedReplica) -> bool:
        """Return True if both hold the same memory of the same node, at the same level."""
        return (
            self.node_id == other.node_id
            and self.level is other.level
            and self.on_cpu == other.on_cpu
            and self.gpu_mem_bytes_by_id == other.gpu_mem_bytes_by_id
            and self.gpu_memory_fraction == other.gpu_memory_fraction
        )
