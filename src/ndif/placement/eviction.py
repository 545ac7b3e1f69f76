"""Which replicas are evicted for another, and in which order.

Never a dedicated replica; none that became HOT less than `minimum_deployment_time_s` ago, unless the new
model is dedicated; and none of a model in the same request. The others are evicted in this order: on the
fewest GPUs first, then the smallest, then the one that has been HOT longest. Replicas whose eviction turns
out not to be needed stay, the last of the order first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

from ndif.placement.demand import PlacementRules
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources

EvictionSteps = list[tuple[float, int]]
"""Moments, from -inf on, and the largest model that fits without the evictable replicas HOT up to then."""


def is_evictable(replica: PlacedReplica, evictable_until: float, together: Set[str]) -> bool:
    """Return True if a HOT replica may be evicted for one that may evict replicas HOT since before then."""
    return (
        not replica.dedicated
        and replica.deployed <= evictable_until
        and replica.model_key not in together
    )


def eviction_order(hot: Iterable[PlacedReplica]) -> list[PlacedReplica]:
    """Return HOT replicas in the order of their eviction."""
    return sorted(hot, key=lambda d: (len(d.gpu_mem_bytes_by_id), d.size_bytes, d.deployed, d.key))


def smallest_first(cached: Iterable[PlacedReplica]) -> list[PlacedReplica]:
    """Return WARM replicas in the order of their deletion."""
    return sorted(cached, key=lambda d: (d.size_bytes, d.deployed, d.key))


def fewest_evictions(
    ordered: Sequence[PlacedReplica], ledger: Ledger, size_bytes: int
) -> list[PlacedReplica] | None:
    """Return the replicas of `ordered` without which a model of this size fits; each of them is needed.

    None if the model does not fit without any of them.
    """
    evicted: list[PlacedReplica] = []
    for replica in ordered:
        if ledger.room >= size_bytes:
            break
        ledger.release(replica)
        evicted.append(replica)
    if ledger.room < size_bytes:
        return None
    needed: list[PlacedReplica] = []
    for replica in reversed(evicted):
        ledger.claim(replica)
        if ledger.room < size_bytes:
            ledger.release(replica)
            needed.append(replica)
    return needed[::-1]


def make_room(
    cached: Iterable[PlacedReplica], free_bytes: int, size_bytes: int
) -> list[PlacedReplica] | None:
    """Return the WARM replicas to delete so that another can become WARM; None if they do not suffice."""
    return fewest_evictions(smallest_first(cached), CpuLedger(free_bytes), size_bytes)


def eviction_steps(hot: Iterable[PlacedReplica], ledger: Ledger) -> EvictionSteps:
    """Return how the eviction of HOT replicas, the oldest first, makes room."""
    steps = [(-math.inf, ledger.room)]
    for replica in sorted(hot, key=lambda replica: replica.deployed):
        ledger.release(replica)
        steps.append((replica.deployed, ledger.room))
    return steps


class GpuLedger:
    """GPU memory of a node, from which replicas are released, and claimed again.

    A model fits exactly where `packing.assign` finds a place for it.
    """

    def __init__(self, resources: Resources, rules: PlacementRules) -> None:
        self._resources = resources
        self._rules = rules
        self._free = list(resources.free_gpu_bytes)

    @property
    def room(self) -> int:
        """Return the largest model that fits, in bytes."""
        resources = self._resources
        empty = share = 0
        for index, (total, free) in enumerate(zip(resources.gpu_bytes, self._free, strict=True)):
            if index in resources.withdrawn:
                continue
            if free == total:
                empty += resources.model_bytes(index)
            elif free:
                held = self._rules.largest_share(total, free) - resources.context_bytes
                share = max(share, held)
        # `PlacementRules` ensures that an empty GPU holds a larger model unshared than shared.
        return max(empty, share)

    def release(self, replica: PlacedReplica) -> None:
        """Free the memory of a replica."""
        for index, held in replica.gpu_mem_bytes_by_id.items():
            self._free[index] += held

    def claim(self, replica: PlacedReplica) -> None:
        """Take the memory of a released replica again."""
        for index, held in replica.gpu_mem_bytes_by_id.items():
            self._free[index] -= held


class CpuLedger:
    """CPU memory of a node, for replicas that run there."""

    def __init__(self, free_bytes: int) -> None:
        self.room = free_bytes

    def release(self, replica: PlacedReplica) -> None:
        """Free the memory of a replica."""
        self.room += replica.cpu_bytes

    def claim(self, replica: PlacedReplica) -> None:
        """Take the memory of a released replica again."""
        self.room -= replica.cpu_bytes


Ledger = GpuLedger | CpuLedger
