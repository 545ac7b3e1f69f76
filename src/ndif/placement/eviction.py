"""Which replicas are evicted for another, and in which order.

Never a dedicated replica; none that became HOT less than `minimum_deployment_time_s` ago, unless the new
model is dedicated; and none of a model in the same request. The others are evicted in this order: on the
fewest GPUs first, then the smallest, then the one that has been HOT longest. Replicas whose eviction turns
out not to be needed stay, the last of the order first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from ndif.placement.ledger import CpuLedger, Ledger
from ndif.placement.replica import PlacedReplica


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
