"""The quick look at a node: for a thousand nodes, this alone says which of them can still win.

It says what `Node.evaluate` would, but not who has to go.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ndif.cluster.deployment import Deployment
from ndif.cluster.ledger import CpuLedger, GpuLedger, Ledger
from ndif.cluster.resources import Resources
from ndif.cluster.rules import Rules

Replicas = Mapping[str, Mapping[str, Deployment]]
"""Replicas by model key, then by replica id."""

NOBODY: frozenset[str] = frozenset()
"""No model."""


@dataclass(frozen=True, slots=True)
class Steps:
    """What fits if everything goes that became HOT until a moment, for every moment."""

    times: list[float]
    rooms: list[int]
    """Before the first moment, and from each on."""

    def room(self, displaces: float) -> int:
        """The largest model that fits if everything goes that became HOT until then."""
        return self.rooms[bisect_right(self.times, displaces)]

    def displaced_by(self, size_bytes: int) -> float:
        """The moment at which such a model first fits: -inf if it does without, inf if it never does."""
        step = bisect_left(self.rooms, size_bytes)
        if step == len(self.rooms):
            return math.inf
        return self.times[step - 1] if step else -math.inf


class Outlook:
    """What a node could take, and what it could if others went. Computed once for a node."""

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
        self, resources: Resources, deployments: Replicas, cache: Replicas, rules: Rules
    ) -> None:
        self.rules = rules
        self.models = frozenset((*deployments, *cache))
        """Models that have a replica here, HOT or WARM."""
        self.replica_ids = frozenset(
            replica_id
            for level in (deployments, cache)
            for replicas in level.values()
            for replica_id in replicas
        )
        self._resources = resources
        self._deployments = deployments
        self._cache = cache
        self._rooms = (GpuLedger(resources, rules).room, resources.free_cpu_bytes)
        self._capacities = (resources.all_model_bytes, resources.cpu_bytes)
        self._steps: list[Steps | None] = [None, None]

    def room(self, on_cpu: bool) -> int:
        """The largest model that fits as things are."""
        return self._rooms[on_cpu]

    def capacity(self, on_cpu: bool) -> int:
        """The largest model that would fit if nobody else were here."""
        return self._capacities[on_cpu]

    def steps(self, on_cpu: bool, model_key: str, together: Set[str]) -> Steps:
        """What fits of a model if others go: none of those that are asked for together with it."""
        if not self.models.isdisjoint(together):
            return self._walk(on_cpu, together, together - {model_key})
        known = self._steps[on_cpu]
        if known is None:
            known = self._steps[on_cpu] = self._walk(on_cpu, NOBODY, NOBODY)
        return known

    def _walk(self, on_cpu: bool, kept_hot: Set[str], kept_warm: Set[str]) -> Steps:
        ledger: Ledger = GpuLedger(self._resources, self.rules)
        if on_cpu:
            ledger = CpuLedger(self._resources.free_cpu_bytes)
            for model_key, replicas in self._cache.items():
                if model_key not in kept_warm:
                    for deployment in replicas.values():
                        ledger.release(deployment)
        movable = [
            deployment
            for model_key, replicas in self._deployments.items()
            if model_key not in kept_hot
            for deployment in replicas.values()
            if deployment.on_cpu == on_cpu and not deployment.dedicated
        ]
        movable.sort(key=lambda deployment: deployment.deployed)
        steps = Steps([deployment.deployed for deployment in movable], [ledger.room])
        for deployment in movable:
            ledger.release(deployment)
            steps.rooms.append(ledger.room)
        return steps
