"""Sizes of the models that a node could take, computed once for a node.

`Node.evaluate` also says which replicas would be evicted, and takes ten times as long. Of 1,000 nodes it
would have to be asked for each decision: a decision then takes 23 to 38 ms where there is room and 69 to 79
ms where replicas must be evicted, instead of 2 and 7 to 12 ms (`bench/placement.py`, limit 20 ms). So a
search narrows the nodes down by this index and evaluates the one that it chooses.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ndif.placement.demand import PlacementRules
from ndif.placement.ledger import CpuLedger, GpuLedger, Ledger
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources

Replicas = Mapping[str, Mapping[str, PlacedReplica]]
"""Replicas by model key, then by replica id."""

NO_MODELS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class EvictionSteps:
    """Largest model that fits after evicting all replicas HOT since before a moment, for every moment."""

    times: list[float]
    rooms: list[int]
    """Bytes before the first moment, and from each moment on."""

    def room(self, evictable_until: float) -> int:
        """Return the largest model that fits if every replica is evicted that became HOT up to then."""
        return self.rooms[bisect_right(self.times, evictable_until)]

    def first_fit(self, size_bytes: int) -> float:
        """Return the first moment for which such a model fits: -inf without evictions, inf if never."""
        step = bisect_left(self.rooms, size_bytes)
        if step == len(self.rooms):
            return math.inf
        return self.times[step - 1] if step else -math.inf


class CapacityIndex:
    """Largest models that fit on a node: now, on the empty node, and after evictions."""

    __slots__ = (
        "_cache",
        "_capacities",
        "_deployments",
        "_resources",
        "_rooms",
        "_steps",
        "models",
        "replica_ids",
        "rules",
    )

    def __init__(
        self, resources: Resources, hot: Replicas, warm: Replicas, rules: PlacementRules
    ) -> None:
        self.rules = rules
        self.models = frozenset((*hot, *warm))
        """Models that have a replica on the node, HOT or WARM."""
        self.replica_ids = frozenset(
            replica_id
            for level in (hot, warm)
            for replicas in level.values()
            for replica_id in replicas
        )
        self._resources = resources
        self._deployments = hot
        self._cache = warm
        self._rooms = (GpuLedger(resources, rules).room, resources.free_cpu_bytes)
        self._capacities = (resources.all_model_bytes, resources.cpu_bytes)
        self._steps: list[EvictionSteps | None] = [None, None]

    def room(self, on_cpu: bool) -> int:
        """Return the largest model that fits now, in bytes."""
        return self._rooms[on_cpu]

    def capacity(self, on_cpu: bool) -> int:
        """Return the largest model that fits on the empty node, in bytes."""
        return self._capacities[on_cpu]

    def steps(self, on_cpu: bool, model_key: str, together: Set[str]) -> EvictionSteps:
        """Return how evictions free memory for a model, sparing models of the same request."""
        if not self.models.isdisjoint(together):
            return self._walk(on_cpu, together, together - {model_key})
        known = self._steps[on_cpu]
        if known is None:
            known = self._steps[on_cpu] = self._walk(on_cpu, NO_MODELS, NO_MODELS)
        return known

    def _walk(self, on_cpu: bool, kept_hot: Set[str], kept_warm: Set[str]) -> EvictionSteps:
        ledger: Ledger = GpuLedger(self._resources, self.rules)
        if on_cpu:
            ledger = CpuLedger(self._resources.free_cpu_bytes)
            for model_key, replicas in self._cache.items():
                if model_key not in kept_warm:
                    for replica in replicas.values():
                        ledger.release(replica)
        movable = [
            replica
            for model_key, replicas in self._deployments.items()
            if model_key not in kept_hot
            for replica in replicas.values()
            if replica.on_cpu == on_cpu and not replica.dedicated
        ]
        movable.sort(key=lambda replica: replica.deployed)
        steps = EvictionSteps([replica.deployed for replica in movable], [ledger.room])
        for replica in movable:
            ledger.release(replica)
            steps.rooms.append(ledger.room)
        return steps
