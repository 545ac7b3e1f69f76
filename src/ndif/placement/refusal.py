"""Why a replica has no place: which replicas block it, and until when they are protected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ndif.placement.eviction import eviction_order, fewest_evictions, smallest_first
from ndif.placement.ledger import CpuLedger, GpuLedger, Ledger
from ndif.placement.node import Node
from ndif.placement.replica import DeploymentLevel, PlacedReplica
from ndif.placement.search import Nodes, Search


class BlockReason(str, Enum):
    """Reason why a replica that is in the way is not evicted."""

    NOTHING = "nothing"
    """No reason; evicting it alone is not enough."""
    YOUNG = "young"
    """The replica has not been HOT for the minimum deployment time."""
    TOGETHER = "together"
    """The replica's model belongs to the same request."""
    DEDICATED = "dedicated"
    """Only an operator evicts a dedicated replica."""


@dataclass(frozen=True, slots=True)
class Blocker:
    """One replica that would have to be evicted."""

    model_key: str
    replica_id: str
    reason: BlockReason
    protected_s: float = 0.0
    """Seconds of protection that are left of a young replica."""


@dataclass(frozen=True, slots=True)
class PlacementRefusal:
    """Replicas of one model that have no place, and the node that comes nearest."""

    model_key: str
    replicas: int
    """Replicas without a place."""
    size_bytes: int
    on_cpu: bool
    """The figures below are of CPU memory, not of GPUs."""
    node_name: str | None = None
    """Nearest node; None if no node has such memory at all."""
    room_bytes: int = 0
    """Largest model that fits there now."""
    capacity_bytes: int = 0
    """Largest model that fits there without other replicas."""
    blockers: tuple[Blocker, ...] = ()
    """Replicas that would have to be evicted; none if the model is too large for every node."""
    retry_after_s: float | None = None
    """Seconds after which protection ends and there is room; None if time does not help."""


_TIME, _OTHERS, _TOO_SMALL = range(3)
"""Reasons why a node has no room, from the easiest to overcome."""


def refuse(nodes: Nodes, search: Search, replicas: int) -> PlacementRefusal:
    """Return why `replicas` of a model have no place, by the figures of the nearest node."""
    demand = search.demand
    ways = [
        (_distance(node, search, on_cpu), node, on_cpu)
        for on_cpu in demand.on_cpu
        for node in nodes.values()
        if node.capacity_index(search.rules).capacity(on_cpu)
    ]
    if not ways:
        return PlacementRefusal(demand.model_key, replicas, demand.size_bytes, demand.on_cpu[0])
    (short_of, _), node, on_cpu = min(ways, key=lambda way: way[0])
    blockers = () if short_of == _TOO_SMALL else _blockers(node, search, on_cpu)
    patience = bool(blockers) and all(
        o.reason in (BlockReason.NOTHING, BlockReason.YOUNG) for o in blockers
    )
    capacity_index = node.capacity_index(search.rules)
    return PlacementRefusal(
        model_key=demand.model_key,
        replicas=replicas,
        size_bytes=demand.size_bytes,
        on_cpu=on_cpu,
        node_name=node.name,
        room_bytes=capacity_index.room(on_cpu),
        capacity_bytes=capacity_index.capacity(on_cpu),
        blockers=blockers,
        retry_after_s=max(o.protected_s for o in blockers) if patience else None,
    )


def _distance(node: Node, search: Search, on_cpu: bool) -> tuple[int, float]:
    """Return how far a node is from having room: the reason, and how much is missing."""
    capacity_index, size = node.capacity_index(search.rules), search.demand.size_bytes
    if size > capacity_index.capacity(on_cpu):
        return _TOO_SMALL, -capacity_index.capacity(on_cpu)
    steps = search.steps(node, on_cpu)
    first_fit = steps.first_fit(size)
    if first_fit < math.inf:
        return _TIME, first_fit - search.evictable_until
    return _OTHERS, -steps.room(math.inf)


def _blockers(node: Node, search: Search, on_cpu: bool) -> tuple[Blocker, ...]:
    """Return the replicas to evict from a node: unprotected ones first, then those protected for a time."""
    rank = list(BlockReason).index

    def readiness(replica: PlacedReplica) -> tuple[int, float]:
        reason = _block_reason(replica, search)
        return rank(reason), replica.deployed if reason is BlockReason.YOUNG else 0.0

    hot = [d for replicas in node.hot.values() for d in replicas.values()]
    in_the_way = eviction_order(d for d in hot if d.on_cpu == on_cpu)
    ledger: Ledger = GpuLedger(node.resources, search.rules)
    if on_cpu:
        cached = [d for replicas in node.warm.values() for d in replicas.values()]
        in_the_way = [*smallest_first(cached), *in_the_way]
        ledger = CpuLedger(node.resources.free_cpu_bytes)
    evicted = (
        fewest_evictions(sorted(in_the_way, key=readiness), ledger, search.demand.size_bytes) or []
    )
    return tuple(
        _blocker(replica, search)
        for replica in evicted
        # A WARM replica without protection is no obstacle worth reporting.
        if replica.level is DeploymentLevel.HOT
        or _block_reason(replica, search) is not BlockReason.NOTHING
    )


def _block_reason(replica: PlacedReplica, search: Search) -> BlockReason:
    if replica.level is DeploymentLevel.WARM:
        others = search.together - {search.demand.model_key}
        return BlockReason.TOGETHER if replica.model_key in others else BlockReason.NOTHING
    if replica.dedicated:
        return BlockReason.DEDICATED
    if replica.model_key in search.together:
        return BlockReason.TOGETHER
    return BlockReason.YOUNG if replica.deployed > search.evictable_until else BlockReason.NOTHING


def _blocker(replica: PlacedReplica, search: Search) -> Blocker:
    reason = _block_reason(replica, search)
    protected_s = replica.deployed - search.evictable_until if reason is BlockReason.YOUNG else 0.0
    return Blocker(replica.model_key, replica.replica_id, reason, protected_s)
