"""A node's memory as it would be if some of its replicas went: the largest model that would then fit."""

from __future__ import annotations

from typing import Protocol

from ndif.cluster.deployment import Deployment
from ndif.cluster.resources import Resources
from ndif.cluster.rules import Rules


class Ledger(Protocol):
    """Replicas released and claimed again, and what there is room for."""

    @property
    def room(self) -> int:
        """The largest model that fits, in bytes."""
        ...

    def release(self, deployment: Deployment) -> None:
        """What it holds is free."""
        ...

    def claim(self, deployment: Deployment) -> None:
        """It stays, after all."""
        ...


class GpuLedger:
    """The GPUs of a node. A model fits where `packing.assign` finds it a place, and nowhere else."""

    __slots__ = ("_empty_bytes", "_free", "_resources", "_rules", "_share")

    def __init__(self, resources: Resources, rules: Rules) -> None:
        self._resources = resources
        self._free = list(resources.free_gpu_bytes)
        self._rules = rules
        self._count()

    def _count(self) -> None:
        self._empty_bytes = 0
        """Of all empty GPUs together: what a model may take as its own."""
        self._share = 0
        """The largest model that yet has a share of any GPU."""
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
        # An empty GPU holds more as a model's own than as a share: `Rules` sees to it.
        return max(self._empty_bytes, self._share)

    def release(self, deployment: Deployment) -> None:
        """See `Ledger.release`."""
        for index, held in deployment.gpu_mem_bytes_by_id.items():
            self._free[index] += held
            self._note(index)

    def claim(self, deployment: Deployment) -> None:
        """See `Ledger.claim`."""
        for index, held in deployment.gpu_mem_bytes_by_id.items():
            self._free[index] -= held
        self._count()


class CpuLedger:
    """The CPU memory of a node, for replicas that run there."""

    __slots__ = ("room",)

    def __init__(self, free_bytes: int) -> None:
        self.room = free_bytes

    def release(self, deployment: Deployment) -> None:
        """See `Ledger.release`."""
        self.room += deployment.cpu_bytes

    def claim(self, deployment: Deployment) -> None:
        """See `Ledger.claim`."""
        self.room -= deployment.cpu_bytes
