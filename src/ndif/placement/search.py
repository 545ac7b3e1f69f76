"""The choice of a node for one replica.

The lowest `CandidateLevel` wins, and chance decides ties. `Device.AUTO` tries GPUs first, at every level,
and CPUs only if no GPU can be had: evicting another replica is better than running many times slower.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from ndif.placement.capacity_index import EvictionSteps
from ndif.placement.demand import Demand, Device, PlacementRules
from ndif.placement.node import Candidate, Node
from ndif.placement.replica import PlacedReplica

T = TypeVar("T")


class RandomSource(Protocol):
    """Randomness for a decision, such as a seeded `random.Random`."""

    def choice(self, seq: Sequence[T], /) -> T:
        """Return one of several equal candidates."""
        ...

    def getrandbits(self, k: int, /) -> int:
        """Return random bits for an id."""
        ...


class TieEnumerator:
    """A source that decides ties in every possible way, one way after another."""

    def __init__(self, rng: RandomSource) -> None:
        """`rng` provides the bits of ids."""
        self._rng = rng
        self._path: list[tuple[int, int]] = []
        """The choice, and the number of candidates, at each tie of this way."""
        self._at = 0

    def choice(self, seq: Sequence[T], /) -> T:
        """Return the candidate of this way; see `RandomSource.choice`."""
        if self._at == len(self._path):
            self._path.append((0, len(seq)))
        chosen, _ = self._path[self._at]
        self._at += 1
        return seq[chosen]

    def getrandbits(self, k: int, /) -> int:
        """Return random bits; see `RandomSource.getrandbits`."""
        return self._rng.getrandbits(k)

    def next(self) -> bool:
        """Advance to the next way; return False if there is none."""
        self._at = 0
        while self._path:
            chosen, several = self._path.pop()
            if chosen + 1 < several:
                self._path.append((chosen + 1, several))
                return True
        return False


Nodes = Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class Search:
    """The search for a place for one replica."""

    demand: Demand
    now: float
    rules: PlacementRules
    together: frozenset[str]
    """Models of the same request, none of which is evicted for another."""

    @property
    def evictable_until(self) -> float:
        """Return the moment up to which a replica must have become HOT to be evicted."""
        return self.rules.evictable_until(self.now, dedicated=self.demand.dedicated)

    def steps(self, node: Node, on_cpu: bool) -> EvictionSteps:
        """Return how evictions free memory on a node."""
        return node.capacity_index(self.rules).steps(on_cpu, self.demand.model_key, self.together)

    def fits(self, node: Node, on_cpu: bool, size_bytes: int) -> bool:
        """Return True if so many bytes fit on a node after every permitted eviction."""
        if size_bytes > node.capacity_index(self.rules).capacity(on_cpu):
            return False
        return size_bytes <= self.steps(node, on_cpu).room(self.evictable_until)

    def evaluate(self, node: Node, replica_id: str) -> Candidate:
        """Return how a node would place the replica."""
        return node.evaluate(self.demand, replica_id, self.now, self.rules, self.together)


@dataclass(frozen=True, slots=True)
class Choice:
    """The node for a replica, and the evictions that it takes."""

    node: Node
    replica_id: str
    candidate: Candidate


def choose(nodes: Nodes, search: Search, rng: RandomSource) -> Choice | None:
    """Return the best place for one more replica; None if there is none.

    A WARM replica returns to its own node only, where its weights are. A new replica has a new id.
    """
    for on_cpu in search.demand.on_cpu:
        device = Device.CPU if on_cpu else Device.GPU
        there = replace(search, demand=replace(search.demand, device=device))
        if (found := _best(nodes, there, on_cpu, rng)) is not None:
            node, warm = found
            replica_id = warm.replica_id if warm else new_replica_id(nodes, search.rules, rng)
            return Choice(node, replica_id, there.evaluate(node, replica_id))
    return None


def _best(
    nodes: Nodes, search: Search, on_cpu: bool, rng: RandomSource
) -> tuple[Node, PlacedReplica | None] | None:
    """Return one of the best nodes, and the WARM replica there if one is to return."""
    rules, size = search.rules, search.demand.size_bytes
    warm = [
        (node, replica)
        for node in nodes.values()
        for replica in node.warm.get(search.demand.model_key, {}).values()
        if replica.on_cpu == on_cpu
    ]
    # A WARM replica of the CPU has its memory already.
    ready = [
        (node, replica)
        for node, replica in warm
        if on_cpu or replica.size_bytes <= node.capacity_index(rules).room(on_cpu)
    ]
    if ready:
        return rng.choice(ready)
    free = [node for node in nodes.values() if size <= node.capacity_index(rules).room(on_cpu)]
    if free:
        return rng.choice(free), None
    ready = [
        (node, replica) for node, replica in warm if search.fits(node, on_cpu, replica.size_bytes)
    ]
    if ready:
        return rng.choice(ready)
    full = [node for node in nodes.values() if search.fits(node, on_cpu, size)]
    return (rng.choice(full), None) if full else None


def new_replica_id(nodes: Nodes, rules: PlacementRules, rng: RandomSource) -> str:
    """Return a UUID in hex that no replica has."""
    while True:
        replica_id = uuid.UUID(int=rng.getrandbits(128), version=4).hex
        if not any(replica_id in node.capacity_index(rules).replica_ids for node in nodes.values()):
            return replica_id
