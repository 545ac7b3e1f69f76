"""The record of one replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ndif.cluster.level import DeploymentLevel

ReplicaKey = tuple[str, str]
"""Model key and replica id: what names a replica in the whole cluster."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One replica of one model on one node, and what it holds there.

    HOT on GPUs it holds what `gpu_mem_bytes_by_id` says, CUDA contexts among it. WARM it holds its size of
    the node's CPU memory. A replica that runs on the CPU holds its size of CPU memory at either level: its
    weights do not move.
    """

    model_key: str
    replica_id: str
    node_id: str
    level: DeploymentLevel
    size_bytes: int
    deployed: float
    """When it became HOT, for the last time; Unix seconds."""
    gpu_mem_bytes_by_id: Mapping[int, int] = field(default_factory=dict)
    gpu_memory_fraction: float | None = None
    """Its share of the one GPU that it shares; None where its GPUs are its own, or it has none."""
    dedicated: bool = False
    on_cpu: bool = False

    @property
    def key(self) -> ReplicaKey:
        """What names it in the whole cluster."""
        return self.model_key, self.replica_id

    @property
    def name(self) -> str:
        """What its actor is called."""
        return f"ModelActor:{self.model_key}:{self.replica_id}"

    @property
    def cpu_bytes(self) -> int:
        """What it holds of the node's CPU memory."""
        return self.size_bytes if self.on_cpu or self.level is DeploymentLevel.WARM else 0

    def warm(self) -> Deployment:
        """The same replica, off its device: no longer anybody's own, and its GPUs free."""
        return replace(
            self,
            level=DeploymentLevel.WARM,
            gpu_mem_bytes_by_id={},
            gpu_memory_fraction=None,
            dedicated=False,
        )

    def same_place(self, other: Deployment) -> bool:
        """Whether both hold the same memory of the same node, at the same level."""
        return (
            self.node_id == other.node_id
            and self.level is other.level
            and self.on_cpu == other.on_cpu
            and self.gpu_mem_bytes_by_id == other.gpu_mem_bytes_by_id
            and self.gpu_memory_fraction == other.gpu_memory_fraction
        )

    def describe(self) -> dict[str, Any]:
        """It, for JSON."""
        return {
            "model_key": self.model_key,
            "replica_id": self.replica_id,
            "node_id": self.node_id,
            "level": self.level.value,
            "size_bytes": self.size_bytes,
            "deployed": self.deployed,
            "gpu_mem_bytes_by_id": {str(i): held for i, held in self.gpu_mem_bytes_by_id.items()},
            "gpu_memory_fraction": self.gpu_memory_fraction,
            "dedicated": self.dedicated,
            "on_cpu": self.on_cpu,
        }
