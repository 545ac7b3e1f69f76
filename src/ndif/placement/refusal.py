"""The refusal of a replica that has no place: the blocking replicas, their protection, and the message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

from ndif.config.units import format_duration
from ndif.placement.eviction import (
    eviction_order,
    fewest_evictions,
    smallest_first,
)
from ndif.placement.node import Node
from ndif.placement.packing import largest_fit
from ndif.placement.replica import PlacedReplica
from ndif.placement.search import Nodes, Search
from ndif.schema.model_key import Variant
from ndif.schema.states import DeploymentLevel
from ndif.sizes import format_size

_MINUTE_S = 60
_HOUR_S = 3600
_MOST_NAMED = 4


class BlockReason(str, Enum):
    """Reason why a blocking replica is not evicted."""

    NOTHING = "nothing"
    """No reason: the replica can be evicted, but its eviction alone is not enough."""
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
    """Remaining seconds of a young replica's protection."""


@dataclass(frozen=True, slots=True)
class PlacementRefusal:
    """The refusal of one model's replicas, with the figures of the node that comes nearest."""

    model_key: str
    replicas: int
    """Replicas without a place."""
    size_bytes: int
    on_cpu: bool
    """True if the following figures describe CPU memory; False if GPUs."""
    node_name: str | None = None
    """Nearest node; None if no node has such memory."""
    room_bytes: int = 0
    """Size of the largest model that fits on the node now."""
    capacity_bytes: int = 0
    """Size of the largest model that fits on the node without other replicas."""
    blockers: tuple[Blocker, ...] = ()
    """Replicas that would have to be evicted; empty if the model is too large for every node."""
    retry_after_s: float | None = None
    """Seconds until the protection ends and the model fits; None if waiting does not help."""


_TIME, _OTHERS, _TOO_SMALL = range(3)
"""Reasons why a model does not fit on a node, from the easiest to overcome."""


def refuse(nodes: Nodes, search: Search, replicas: int) -> PlacementRefusal:
    """Return the refusal of `replicas` replicas of a model, with the figures of the nearest node."""
    demand = search.demand
    ways = [
        (_distance(node, search, on_cpu), node, on_cpu)
        for on_cpu in demand.on_cpu
        for node in nodes.values()
    ]
    nearest = min(ways, key=lambda way: way[0], default=None)
    if nearest is None or not nearest[1].capacity(nearest[2]):
        return PlacementRefusal(demand.model_key, replicas, demand.size_bytes, demand.on_cpu[0])
    (short_of, _), node, on_cpu = nearest
    blockers = () if short_of == _TOO_SMALL else _blockers(node, search, on_cpu)
    patience = bool(blockers) and all(
        o.reason in (BlockReason.NOTHING, BlockReason.YOUNG) for o in blockers
    )
    return PlacementRefusal(
        model_key=demand.model_key,
        replicas=replicas,
        size_bytes=demand.size_bytes,
        on_cpu=on_cpu,
        node_name=node.name,
        room_bytes=node.largest_fit(on_cpu, search.rules),
        capacity_bytes=node.capacity(on_cpu),
        blockers=blockers,
        retry_after_s=max(o.protected_s for o in blockers) if patience else None,
    )


def _distance(node: Node, search: Search, on_cpu: bool) -> tuple[int, float]:
    """Return how far a model is from fitting on a node: the reason, and a distance for this reason."""
    size_bytes = search.demand.size_bytes
    steps = search.steps(node, on_cpu)
    for since, room_bytes in steps:
        if room_bytes >= size_bytes:
            return _TIME, since - search.evictable_until
    capacity, (_, most) = node.capacity(on_cpu), steps[-1]
    return (_TOO_SMALL, -capacity) if size_bytes > capacity else (_OTHERS, -most)


def _blockers(node: Node, search: Search, on_cpu: bool) -> tuple[Blocker, ...]:
    """Return the replicas to evict from a node: unprotected replicas first, then the least protected."""
    residents = eviction_order(node.hot_on(on_cpu))
    if on_cpu:
        residents = [*smallest_first(node.cached()), *residents]
    blockers = {replica.key: _blocker(replica, search) for replica in residents}
    rank = list(BlockReason).index
    residents.sort(key=lambda d: (rank(blockers[d.key].reason), blockers[d.key].protected_s))
    fits = partial(largest_fit, rules=search.rules, on_cpu=on_cpu)
    evicted = fewest_evictions(residents, node.resources, search.demand.size_bytes, fits) or []
    return tuple(
        blockers[replica.key]
        for replica in evicted
        # An unprotected WARM replica is not worth reporting.
        if replica.level is DeploymentLevel.HOT
        or blockers[replica.key].reason is not BlockReason.NOTHING
    )


def _blocker(replica: PlacedReplica, search: Search) -> Blocker:
    reason, protected_s = BlockReason.NOTHING, 0.0
    if replica.level is DeploymentLevel.WARM:
        if replica.model_key in search.together - {search.demand.model_key}:
            reason = BlockReason.TOGETHER
    elif replica.dedicated:
        reason = BlockReason.DEDICATED
    elif replica.model_key in search.together:
        reason = BlockReason.TOGETHER
    elif replica.deployed > search.evictable_until:
        reason, protected_s = BlockReason.YOUNG, replica.deployed - search.evictable_until
    return Blocker(replica.model_key, replica.replica_id, reason, protected_s)


def explain_refusal(refusal: PlacementRefusal) -> str:
    """Explain why the model has no place, which models block it, and when to try again."""
    memory = "CPU memory" if refusal.on_cpu else "GPUs"
    need = f"{_name(refusal.model_key)} needs {_size(refusal.size_bytes)} "
    need += "of CPU memory" if refusal.on_cpu else "on GPUs"
    if refusal.replicas > 1:
        need += f" for each of {refusal.replicas} more replicas"
    if refusal.node_name is None:
        return f"{need}; no node of this server has {memory}."
    if not refusal.blockers:
        capacity = _size(refusal.capacity_bytes)
        return f"{need}; the largest node, {refusal.node_name}, has {capacity}."
    room = f"room for {_size(refusal.room_bytes)}" if refusal.room_bytes else "no room"
    reasons = [f"{need}; {refusal.node_name} has {room}", *_reasons(refusal)]
    if refusal.retry_after_s is not None:
        return f"{'; '.join(reasons)}. Try again in {_duration(refusal.retry_after_s)}."
    return f"{'; '.join(reasons)}."


def _reasons(refusal: PlacementRefusal) -> list[str]:
    reasons = []
    if dedicated := _blocked_by(refusal, BlockReason.DEDICATED):
        reasons.append(f"{_names(dedicated)} (dedicated) would have to be evicted")
    if together := _blocked_by(refusal, BlockReason.TOGETHER):
        reasons.append(f"{_names(together)} (part of the same request) would have to be evicted")
    if young := _blocked_by(refusal, BlockReason.YOUNG):
        verb = "is" if len(young) == 1 else "are"
        until = _duration(max(young.values()))
        reasons.append(f"{_names(young)} {verb} protected for another {until}")
    return reasons


def _blocked_by(refusal: PlacementRefusal, reason: BlockReason) -> dict[str, float]:
    """Return the models that a reason protects, with the remaining seconds of protection."""
    held: dict[str, float] = {}
    for blocker in refusal.blockers:
        if blocker.reason is reason:
            earlier = held.get(blocker.model_key, 0.0)
            held[blocker.model_key] = max(blocker.protected_s, earlier)
    return held


def _names(models: Mapping[str, float]) -> str:
    names = [_name(model_key) for model_key in models]
    if len(names) > _MOST_NAMED:
        names[_MOST_NAMED:] = [f"{len(names) - _MOST_NAMED} others"]
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _name(model_key: str) -> str:
    try:
        key = Variant.parse(model_key).model
    except ValueError:
        return repr(model_key)
    return repr(key.repo_id) + (f" at revision {key.revision!r}" if key.revision else "")


def _size(size_bytes: int) -> str:
    return format_size(size_bytes)


def _duration(seconds: float) -> str:
    """Format a duration, rounded up so that a retry does not come too early."""
    step = 1 if seconds <= _MINUTE_S else _MINUTE_S if seconds <= 2 * _HOUR_S else _HOUR_S
    return format_duration(math.ceil(seconds / step) * step)
