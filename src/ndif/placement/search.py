"""The choice of a node for one replica.

The lowest `CandidateLevel` wins, then the node with the fewest HOT replicas of the same model, so that the
loss of a node costs few replicas. A node that has the model's files wins next; chance decides ties.
`Device.AUTO` tries GPUs first, at every level, and CPUs only if no GPU can be freed: evicting another
replica is better than running many times slower.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from ndif.placement.demand import Demand, PlacementRules
from ndif.placement.eviction import EvictionSteps
from ndif.placement.node import Candidate, Node
from ndif.placement.replica import PlacedReplica

Nodes = Mapping[str, Node]

Choice = tuple[Node, PlacedReplica | None]
"""A node, and the WARM replica that returns to its device; None for a new replica."""


class TieEnumerator(Random):
    """A random source that enumerates all decisions of ties, one combination (a *way*) at a time."""

    def __init__(self, rng: Random) -> None:
        """Begin with the first way; `rng` provides the bits of ids."""
        super().__init__()
        self._rng = rng
        self._path: list[tuple[int, int]] = []
        """The index of the choice and the number of candidates, for each tie of this way."""
        self._at = 0

    def choice(self, seq: Any) -> Any:
        """Return the candidate that this way chooses."""
        if self._at == len(self._path):
            self._path.append((0, len(seq)))
        chosen, _ = self._path[self._at]
        self._at += 1
        return seq[chosen]

    def getrandbits(self, k: int, /) -> int:
        """Return random bits of `rng`."""
        return self._rng.getrandbits(k)

    def next(self) -> bool:
        """Advance to the next way; return False after the last way."""
        self._at = 0
        while self._path:
            chosen, several = self._path.pop()
            if chosen + 1 < several:
                self._path.append((chosen + 1, several))
                return True
        return False


@dataclass(frozen=True, slots=True)
class Search:
    """The search for a place for one replica."""

    demand: Demand
    now: float
    rules: PlacementRules
    together: frozenset[str]
    """Models of the same request, which are not evicted for each other."""

    @property
    def evictable_until(self) -> float:
        """Return the latest time at which an evictable replica became HOT."""
        return self.rules.evictable_until(self.now, dedicated=self.demand.dedicated)

    def steps(self, node: Node, on_cpu: bool) -> EvictionSteps:
        """Return `Node.eviction_steps` of a node for the demand."""
        return node.eviction_steps(on_cpu, self.rules, self.demand.model_key, self.together)

    def fits(self, node: Node, on_cpu: bool, size_bytes: int) -> bool:
        """Return True if `size_bytes` fit on a node after permitted evictions."""
        until = self.evictable_until
        return any(
            since <= until and room >= size_bytes for since, room in self.steps(node, on_cpu)
        )


def choose(nodes: Nodes, search: Search, rng: Random) -> tuple[Node, str, Candidate] | None:
    """Return the node, the id and the place of one more replica; None if the replica does not fit.

    A WARM replica returns only on its own node, where its weights are. A new replica gets a new id.
    """
    for on_cpu in search.demand.on_cpu:
        if (best := _best(nodes, search, on_cpu, rng)) is not None:
            node, warm = best
            replica_id = warm.replica_id if warm else new_replica_id(nodes, rng)
            demand, rules = search.demand, search.rules
            candidate = node.evaluate(demand, replica_id, search.now, rules, search.together)
            return node, replica_id, candidate
    return None


def _best(nodes: Nodes, search: Search, on_cpu: bool, rng: Random) -> Choice | None:
    """Return one of the best nodes, and the WARM replica that returns to its device, if any."""
    rules, size = search.rules, search.demand.size_bytes
    spread = partial(_spread, search.demand, rng=rng)
    warm = [
        (node, replica)
        for node in nodes.values()
        for replica in node.warm.get(search.demand.model_key, {}).values()
        if replica.on_cpu == on_cpu
    ]
    # A WARM replica on the CPU already has its memory.
    ready = [
        (node, replica)
        for node, replica in warm
        if on_cpu or replica.size_bytes <= node.largest_fit(on_cpu, rules)
    ]
    if ready:
        return spread(ready)
    free = [(node, None) for node in nodes.values() if size <= node.largest_fit(on_cpu, rules)]
    if free:
        return spread(free)
    ready = [
        (node, replica) for node, replica in warm if search.fits(node, on_cpu, replica.size_bytes)
    ]
    if ready:
        return spread(ready)
    full = [(node, None) for node in nodes.values() if search.fits(node, on_cpu, size)]
    return spread(full) if full else None


def _spread(demand: Demand, choices: Sequence[Choice], *, rng: Random) -> Choice:
    """Return a choice whose node has the fewest HOT replicas of the model and, if possible, its files."""
    ranks = [
        (len(node.hot.get(demand.model_key, ())), node.id not in demand.files_on)
        for node, _ in choices
    ]
    first = min(ranks)
    choice: Choice = rng.choice(
        [choice for choice, rank in zip(choices, ranks, strict=True) if rank == first]
    )
    return choice


def new_replica_id(nodes: Nodes, rng: Random) -> str:
    """Return an unused UUID in hexadecimal digits."""
    while True:
        replica_id = uuid.UUID(int=rng.getrandbits(128), version=4).hex
        levels = (level for node in nodes.values() for level in (node.hot, node.warm))
        if not any(replica_id in replicas for level in levels for replicas in level.values()):
            return replica_id
