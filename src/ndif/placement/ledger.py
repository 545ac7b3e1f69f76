"""A node's memory with some of its replicas released: the largest model that then fits."""

from __future__ import annotations

from typing import Protocol

from ndif.placement.demand import PlacementRules
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources


class Ledger(Protocol):
    """Memory from which replicas are released, and claimed again."""

    @property
    def room(self) -> int:
        """Return the largest model that fits, in bytes."""
        ...

    def release(self, replica: PlacedReplica) -> None:
        """Free the memory of a replica."""
        ...

    def claim(self, replica: PlacedReplica) -> None:
        """Take the memory of a released replica again."""
        ...


class GpuLedger:
    """GPU memory of a node. A model fits exactly where `packing.assign` finds a place for it."""

    __slots__ = ("_empty_bytes", "_free", "_resources", "_rules", "_share")

    def __init__(self, resources: Resources, rules: PlacementRules) -> None:
        self._resources = resources
        self._free = list(resources.free_gpu_bytes)
        self._rules = rules
        self._count()

    def _count(self) -> None:
        self._empty_bytes = 0
        """Bytes of all empty GPUs together, which a model may have to itself."""
        self._share = 0
        """Bytes of the largest model that may still share a GPU."""
        for index, free in enumerate(self._free):
            if free:
                self._note(index)

    def _note(self, index: int) -> None:
        if index in self._resources.withdrawn:
            return
        total, free = self._resources.gpu_bytes[index], self._free[index]
        if free == total:
            self._empty_bytes += self._resources.model_bytes(index)
        else:
            share = self._rules.largest_share(total, free) - self._resources.context_bytes
            self._share = max(self._share, share)

    @property
    def room(self) -> int:
        """See `Ledger.room`."""
        # `PlacementRules` ensures that an empty GPU holds a larger model unshared than shared.
        return max(self._empty_bytes, self._share)

    def release(self, replica: PlacedReplica) -> None:
        """See `Ledger.release`."""
        for index, held in replica.gpu_mem_bytes_by_id.items():
            self._free[index] += held
            self._note(index)

    def claim(self, replica: PlacedReplica) -> None:
        """See `Ledger.claim`."""
        for index, held in replica.gpu_mem_bytes_by_id.items():
            self._free[index] -= held
        self._count()


class CpuLedger:
    """CPU memory of a node, for replicas that run there."""

    __slots__ = ("room",)

    def __init__(self, free_bytes: int) -> None:
        self.room = free_bytes

    def release(self, replica: PlacedReplica) -> None:
        """See `Ledger.release`."""
        self.room += replica.cpu_bytes

    def claim(self, replica: PlacedReplica) -> None:
        """See `Ledger.claim`."""
        self.room -= replica.cpu_bytes
