"""Node: the memory of one machine, its replicas, and its place for another replica."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from ndif.placement.demand import Demand, PlacementRules
from ndif.placement.eviction import (
    EvictionSteps,
    eviction_order,
    eviction_steps,
    fewest_evictions,
    is_evictable,
    smallest_first,
)
from ndif.placement.packing import assign, largest_fit
from ndif.placement.replica import CandidateLevel, PlacedReplica, ReplicaKey
from ndif.placement.resources import Resources
from ndif.schema.states import DeploymentLevel

Replicas = Mapping[str, Mapping[str, PlacedReplica]]
"""Replicas by model key, then by replica id."""

NO_MODELS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """The result of placing a replica on a node."""

    level: CandidateLevel
    on_cpu: bool = False
    gpu_mem_bytes_by_id: Mapping[int, int] = field(default_factory=dict)
    gpu_memory_fraction: float | None = None
    evictions: tuple[PlacedReplica, ...] = ()
    """HOT replicas that are evicted for the replica."""
    dropped: tuple[PlacedReplica, ...] = ()
    """WARM replicas that are deleted for a replica on the CPU; for GPUs, `Node.with_evicted` finds them."""


_FREE_CPU = attrgetter("free_cpu_bytes")
_NO_PLACE = Candidate(CandidateLevel.CANT_ACCOMMODATE)


@dataclass(frozen=True, slots=True)
class Node:
    """One machine and its replicas. Immutable: each change returns a new node that shares the rest.

    CPU memory holds WARM replicas and replicas that run on the CPU. A replica that runs on the CPU keeps
    its memory and its process when it becomes WARM. Because that frees no memory, such a replica is deleted
    instead if memory is needed.
    """

    id: str
    name: str
    resources: Resources
    hot: Replicas = field(default_factory=dict)
    """Replicas on their devices."""
    warm: Replicas = field(default_factory=dict)
    """Replicas in CPU memory."""
    _steps: dict[bool, tuple[PlacementRules, EvictionSteps]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of `eviction_steps`: a decision reads 1,000 nodes and changes one (`bench/placement.py`)."""

    def largest_fit(self, on_cpu: bool, rules: PlacementRules) -> int:
        """Return the size in bytes of the largest model that fits now."""
        if on_cpu:
            return self.resources.free_cpu_bytes
        return self.eviction_steps(on_cpu, rules)[0][1]

    def capacity(self, on_cpu: bool) -> int:
        """Return the size in bytes of the largest model that fits on the empty node."""
        return self.resources.cpu_bytes if on_cpu else self.resources.all_model_bytes

    def eviction_steps(
        self,
        on_cpu: bool,
        rules: PlacementRules,
        model_key: str = "",
        together: Set[str] = NO_MODELS,
    ) -> EvictionSteps:
        """Return how evictions free memory for a model, without models of the same request."""
        spares = any(key in self.hot or key in self.warm for key in together)
        cached = self._steps.get(on_cpu)
        if not spares and cached is not None and cached[0] is rules:
            return cached[1]
        resources = self.resources
        for replica in self.cached(together - {model_key}) if on_cpu else ():
            resources = resources.given_back({}, replica.cpu_bytes)
        hot = (d for d in self.hot_on(on_cpu) if is_evictable(d, math.inf, together))
        steps = eviction_steps(hot, resources, partial(largest_fit, rules=rules, on_cpu=on_cpu))
        if not spares:
            self._steps[on_cpu] = rules, steps
        return steps

    def hot_on(self, on_cpu: bool) -> Iterator[PlacedReplica]:
        """Yield the HOT replicas on the CPU, or on GPUs."""
        for replicas in self.hot.values():
            yield from (replica for replica in replicas.values() if replica.on_cpu == on_cpu)

    def gpu_name(self, index: int) -> str:
        """Return the cluster-wide name of a GPU: its UUID, or if unknown, its index and node."""
        return self.resources.gpu_uuids[index] or f"GPU {index} of {self.id}"

    def replicas(self) -> Iterator[PlacedReplica]:
        """Yield every replica, HOT ones first."""
        for level in (self.hot, self.warm):
            for replicas in level.values():
                yield from replicas.values()

    def find(self, key: ReplicaKey) -> PlacedReplica | None:
        """Return the replica with this key, HOT or WARM; None if it does not exist."""
        model_key, replica_id = key
        hot = self.hot.get(model_key, {}).get(replica_id)
        return hot or self.warm.get(model_key, {}).get(replica_id)

    def evaluate(
        self,
        demand: Demand,
        replica_id: str,
        now: float,
        rules: PlacementRules,
        together: Set[str] = NO_MODELS,
    ) -> Candidate:
        """Return this node's place for a replica; models in `together` are not evicted for it.

        A WARM replica keeps its size and returns to the kind of device that it came from.
        """
        warm = self.warm.get(demand.model_key, {}).get(replica_id)
        evictable_until = rules.evictable_until(now, dedicated=demand.dedicated)
        for on_cpu in demand.on_cpu:
            if warm is not None and warm.on_cpu != on_cpu:
                continue
            if not on_cpu:
                size = demand.size_bytes if warm is None else warm.size_bytes
                candidate = self._on_gpus(size, evictable_until, together, rules)
            elif warm is not None:
                return Candidate(CandidateLevel.CACHED_AND_FREE, on_cpu=True)
            else:
                candidate = self._on_cpu(demand, evictable_until, together)
            if candidate.level is not CandidateLevel.CANT_ACCOMMODATE:
                return replace(candidate, level=_level(candidate, warm is not None))
        return _NO_PLACE

    def _on_gpus(
        self, size_bytes: int, evictable_until: float, together: Set[str], rules: PlacementRules
    ) -> Candidate:
        hot = self.hot_on(on_cpu=False)
        movable = eviction_order(d for d in hot if is_evictable(d, evictable_until, together))
        fits = partial(largest_fit, rules=rules, on_cpu=False)
        evictions = fewest_evictions(movable, self.resources, size_bytes, fits)
        if evictions is None:
            return _NO_PLACE
        resources = self.resources
        for replica in evictions:
            resources = resources.given_back(replica.gpu_mem_bytes_by_id, 0)
        assignment = assign(resources, size_bytes, rules)
        if assignment is None:
            return _NO_PLACE
        return Candidate(
            CandidateLevel.FREE,
            gpu_mem_bytes_by_id=assignment.gpu_mem_bytes_by_id,
            gpu_memory_fraction=assignment.gpu_memory_fraction,
            evictions=tuple(evictions),
        )

    def _on_cpu(self, demand: Demand, evictable_until: float, together: Set[str]) -> Candidate:
        hot = self.hot_on(on_cpu=True)
        # A WARM replica of the same model cannot return, or it would have been chosen.
        spared = together - {demand.model_key}
        ordered = [
            *smallest_first(self.cached(spared)),
            *eviction_order(d for d in hot if is_evictable(d, evictable_until, together)),
        ]
        evicted = fewest_evictions(ordered, self.resources, demand.size_bytes, _FREE_CPU)
        if evicted is None:
            return _NO_PLACE
        return Candidate(
            CandidateLevel.FREE,
            on_cpu=True,
            evictions=tuple(d for d in evicted if d.level is DeploymentLevel.HOT),
            dropped=tuple(d for d in evicted if d.level is DeploymentLevel.WARM),
        )

    def cached(self, spared: Set[str] = NO_MODELS) -> Iterator[PlacedReplica]:
        """Yield the WARM replicas, except replicas of models in `spared`."""
        for model_key, replicas in self.warm.items():
            if model_key not in spared:
                yield from replicas.values()

    def with_deployed(
        self,
        demand: Demand,
        replica_id: str,
        candidate: Candidate,
        now: float,
        together: Set[str] = NO_MODELS,
        reserved_bytes: int = 0,
    ) -> Node:
        """Return the node with the replica HOT at `candidate`, after its evictions."""
        evicted = [replica.key for replica in candidate.evictions]
        if candidate.on_cpu:
            node = self.without([*evicted, *(replica.key for replica in candidate.dropped)])
        else:
            # While other replicas leave the GPUs, the returning replica is still WARM and holds CPU memory.
            spared = together | {demand.model_key}
            node = self.with_evicted(evicted, spared, reserved_bytes) if evicted else self
        warm = self.warm.get(demand.model_key, {}).get(replica_id)
        replica = PlacedReplica(
            model_key=demand.model_key,
            replica_id=replica_id,
            node_id=self.id,
            level=DeploymentLevel.HOT,
            size_bytes=demand.size_bytes if warm is None else warm.size_bytes,
            deployed=now,
            gpu_mem_bytes_by_id=candidate.gpu_mem_bytes_by_id,
            gpu_memory_fraction=candidate.gpu_memory_fraction,
            dedicated=demand.dedicated,
            on_cpu=candidate.on_cpu,
        )
        return node.without([replica.key]).with_replica(replica)

    def with_evicted(
        self, keys: Iterable[ReplicaKey], spared: Set[str] = NO_MODELS, reserved_bytes: int = 0
    ) -> Node:
        """Return the node with these HOT replicas WARM, or deleted if CPU memory does not suffice.

        The smallest WARM replicas are deleted for them, except replicas of models in `spared`.
        `reserved_bytes` look free but are not: a replica frees them only after these have become WARM.
        """
        node = self
        replicas = [self.hot.get(model_key, {}).get(replica_id) for model_key, replica_id in keys]
        for replica in smallest_first(d for d in replicas if d is not None):
            cached = node.cached(spared)
            node = node.without([replica.key])
            size_bytes = replica.size_bytes + reserved_bytes
            # A replica on the CPU keeps its memory.
            dropped = (
                []
                if replica.on_cpu
                else fewest_evictions(smallest_first(cached), node.resources, size_bytes, _FREE_CPU)
            )
            if dropped is not None:
                node = node.without(d.key for d in dropped).with_replica(replica.as_warm())
        return node

    def with_dedicated(self, replica: PlacedReplica, dedicated: bool) -> Node:
        """Return the node with one HOT replica dedicated, or no longer dedicated."""
        if replica.dedicated == dedicated:
            return self
        return self.without([replica.key]).with_replica(replace(replica, dedicated=dedicated))

    def with_replica(self, replica: PlacedReplica) -> Node:
        """Return the node with one more replica; raise a ValueError if its memory is not free."""
        resources = self.resources.taken(replica.gpu_mem_bytes_by_id, replica.cpu_bytes)
        if replica.level is DeploymentLevel.HOT:
            return replace(self, resources=resources, hot=_with(self.hot, replica))
        return replace(self, resources=resources, warm=_with(self.warm, replica))

    def without(self, keys: Iterable[ReplicaKey]) -> Node:
        """Return the node without these replicas, HOT or WARM, with their memory free."""
        node = self
        for key in keys:
            replica = node.find(key)
            if replica is None:
                continue
            node = replace(
                node,
                resources=node.resources.given_back(replica.gpu_mem_bytes_by_id, replica.cpu_bytes),
                hot=_without(node.hot, key),
                warm=_without(node.warm, key),
            )
        return node

    def emptied(self) -> Node:
        """Return the node without replicas."""
        return Node(self.id, self.name, self.resources.emptied())


def _level(candidate: Candidate, warm: bool) -> CandidateLevel:
    if candidate.evictions or candidate.dropped:
        return CandidateLevel.CACHED_AND_FULL if warm else CandidateLevel.FULL
    return CandidateLevel.CACHED_AND_FREE if warm else CandidateLevel.FREE


def _with(replicas: Replicas, replica: PlacedReplica) -> Replicas:
    own_replicas = replicas.get(replica.model_key, {})
    return {**replicas, replica.model_key: {**own_replicas, replica.replica_id: replica}}


def _without(replicas: Replicas, key: ReplicaKey) -> Replicas:
    model_key, replica_id = key
    if replica_id not in replicas.get(model_key, {}):
        return replicas
    own_replicas = {other: d for other, d in replicas[model_key].items() if other != replica_id}
    others = {other: theirs for other, theirs in replicas.items() if other != model_key}
    return {**others, model_key: own_replicas} if own_replicas else others
