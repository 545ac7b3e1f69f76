"""The choice and the order of replicas to evict for another replica.

Three kinds of replicas are never evicted: dedicated replicas; replicas of a model in the same request; and,
unless the new model is dedicated, replicas that became HOT less than `minimum_deployment_time_s` ago. All
others are evicted in this order: on the fewest GPUs first, then the smallest, then the longest HOT. At the
end, unnecessary evictions are undone, from the last to the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set

from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources

Room = Callable[[Resources], int]
"""Returns the size of the largest model that fits into free memory of one kind; see `packing.room`."""
EvictionSteps = list[tuple[float, int]]
"""Times, from -inf on, and the largest model that fits without evictable replicas HOT up to that time."""


def is_evictable(replica: PlacedReplica, evictable_until: float, together: Set[str]) -> bool:
    """Return True if a replica, HOT by `evictable_until`, is not dedicated and not in `together`."""
    return (
        not replica.dedicated
        and replica.deployed <= evictable_until
        and replica.model_key not in together
    )


def eviction_order(hot: Iterable[PlacedReplica]) -> list[PlacedReplica]:
    """Return HOT replicas in the order of eviction."""
    return sorted(hot, key=lambda d: (len(d.gpu_mem_bytes_by_id), d.size_bytes, d.deployed, d.key))


def smallest_first(cached: Iterable[PlacedReplica]) -> list[PlacedReplica]:
    """Return WARM replicas in the order of deletion."""
    return sorted(cached, key=lambda d: (d.size_bytes, d.deployed, d.key))


def fewest_evictions(
    ordered: Iterable[PlacedReplica], resources: Resources, size_bytes: int, room: Room
) -> list[PlacedReplica] | None:
    """Return the replicas of `ordered` to evict so that a model of this size fits; each one is needed.

    None if the model does not fit even after all evictions.
    """
    evicted: list[PlacedReplica] = []
    for replica in ordered:
        if room(resources) >= size_bytes:
            break
        resources = resources.given_back(replica.gpu_mem_bytes_by_id, replica.cpu_bytes)
        evicted.append(replica)
    if room(resources) < size_bytes:
        return None
    needed: list[PlacedReplica] = []
    for replica in reversed(evicted):
        claimed = resources.taken(replica.gpu_mem_bytes_by_id, replica.cpu_bytes)
        if room(claimed) < size_bytes:
            needed.append(replica)
        else:
            resources = claimed
    return needed[::-1]


def eviction_steps(hot: Iterable[PlacedReplica], resources: Resources, room: Room) -> EvictionSteps:
    """Return the largest model that fits after each eviction of HOT replicas, oldest first."""
    steps = [(-math.inf, room(resources))]
    for replica in sorted(hot, key=lambda replica: replica.deployed):
        resources = resources.given_back(replica.gpu_mem_bytes_by_id, replica.cpu_bytes)
        steps.append((replica.deployed, room(resources)))
    return steps
