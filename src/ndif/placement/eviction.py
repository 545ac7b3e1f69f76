"""The choice of replicas to evict for another, and their order.

Never evicted are dedicated replicas, replicas of a model in the same request, and, unless the new model is
dedicated, replicas that became HOT less than `minimum_deployment_time_s` ago. The others are evicted in
this order: on the fewest GPUs first, then the smallest, then the one that has been HOT longest. Replicas
whose eviction turns out not to be needed stay, the last of the order first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set

from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources

Room = Callable[[Resources], int]
"""Returns the largest model that fits into free memory of one kind, in bytes; see `packing.room`."""
EvictionSteps = list[tuple[float, int]]
"""Moments, from -inf on, and the largest model that fits without the evictable replicas HOT up to then."""


def is_evictable(replica: PlacedReplica, evictable_until: float, together: Set[str]) -> bool:
    """Return True if a HOT replica is not dedicated, became HOT in time, and is not of the same request."""
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
    ordered: Iterable[PlacedReplica], resources: Resources, size_bytes: int, room: Room
) -> list[PlacedReplica] | None:
    """Return the replicas of `ordered` without which a model of this size fits; each of them is needed.

    None if the model does not fit even without all of them.
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
    """Return how the eviction of HOT replicas, the oldest first, makes room."""
    steps = [(-math.inf, room(resources))]
    for replica in sorted(hot, key=lambda replica: replica.deployed):
        resources = resources.given_back(replica.gpu_mem_bytes_by_id, replica.cpu_bytes)
        steps.append((replica.deployed, room(resources)))
    return steps
