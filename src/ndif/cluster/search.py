"""Which node one replica goes to.

The lowest `CandidateLevel` wins, and chance chooses among equals. For `Device.AUTO` this is
asked of the GPUs first, at every level, and of the CPUs only if no GPU can be had: a model that somebody
may be displaced for is not run many times slower instead.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ndif.cluster.deployment import Deployment
from ndif.cluster.node import Candidate, Node
from ndif.cluster.outlook import Steps
from ndif.cluster.rules import Rules
from ndif.cluster.ties import Dice
from ndif.cluster.wanted import Device, Wanted

Nodes = Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class Search:
    """One replica looked for a place for."""

    wanted: Wanted
    now: float
    rules: Rules
    together: frozenset[str]
    """Models of the same request: none of them goes for another."""

    @property
    def displaces(self) -> float:
        """Replicas that became HOT until then may go."""
        return self.rules.displaces(self.now, dedicated=self.wanted.dedicated)

    def steps(self, node: Node, on_cpu: bool) -> Steps:
        """What a node could take if others went."""
        return node.outlook(self.rules).steps(on_cpu, self.wanted.model_key, self.together)

    def fits(self, node: Node, on_cpu: bool, size_bytes: int) -> bool:
        """Whether a node would have room for it, or for as much, if all went that may go."""
        if size_bytes > node.outlook(self.rules).capacity(on_cpu):
            return False
        return size_bytes <= self.steps(node, on_cpu).room(self.displaces)

    def evaluate(self, node: Node, replica_id: str) -> Candidate:
        """What a node would do for it."""
        return node.evaluate(self.wanted, replica_id, self.now, self.rules, self.together)


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a replica goes, and what has to be done for it."""

    node: Node
    replica_id: str
    candidate: Candidate


def choose(nodes: Nodes, search: Search, rng: Dice) -> Choice | None:
    """The best place for one more replica; None if there is none.

    A replica that is WARM returns to its node or not at all: elsewhere there would be nothing of it. So
    what is new on a node has a new id.
    """
    for on_cpu in search.wanted.on_cpu:
        device = Device.CPU if on_cpu else Device.GPU
        there = replace(search, wanted=replace(search.wanted, device=device))
        if (found := _best(nodes, there, on_cpu, rng)) is not None:
            node, warm = found
            replica_id = warm.replica_id if warm else new_replica_id(nodes, search.rules, rng)
            return Choice(node, replica_id, there.evaluate(node, replica_id))
    return None


def _best(
    nodes: Nodes, search: Search, on_cpu: bool, rng: Dice
) -> tuple[Node, Deployment | None] | None:
    """One of the best nodes, and the replica that is WARM there if it is to return."""
    rules, size = search.rules, search.wanted.size_bytes
    warm = [
        (node, deployment)
        for node in nodes.values()
        for deployment in node.cache.get(search.wanted.model_key, {}).values()
        if deployment.on_cpu == on_cpu
    ]
    # On the CPU what is WARM has its memory already.
    ready = [
        (node, deployment)
        for node, deployment in warm
        if on_cpu or deployment.size_bytes <= node.outlook(rules).room(on_cpu)
    ]
    if ready:
        return rng.choice(ready)
    free = [node for node in nodes.values() if size <= node.outlook(rules).room(on_cpu)]
    if free:
        return rng.choice(free), None
    ready = [
        (node, deployment)
        for node, deployment in warm
        if search.fits(node, on_cpu, deployment.size_bytes)
    ]
    if ready:
        return rng.choice(ready)
    full = [node for node in nodes.values() if search.fits(node, on_cpu, size)]
    return (rng.choice(full), None) if full else None


def new_replica_id(nodes: Nodes, rules: Rules, rng: Dice) -> str:
    """A UUID in hex that no replica has."""
    while True:
        replica_id = uuid.UUID(int=rng.getrandbits(128), version=4).hex
        if not any(replica_id in node.outlook(rules).replica_ids for node in nodes.values()):
            return replica_id
