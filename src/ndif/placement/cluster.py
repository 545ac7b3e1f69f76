"""The nodes and replicas of a cluster, and decisions about them as pure functions.

A cluster is immutable. A decision returns a new cluster that shares unchanged nodes. The controller carries
out the difference between the two clusters (`delta.build`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from random import Random

from ndif.placement.demand import DEFAULT_RULES, Demand, PlacementRules
from ndif.placement.node import Node
from ndif.placement.refusal import PlacementRefusal, refuse
from ndif.placement.replica import CandidateLevel, PlacedReplica, ReplicaKey
from ndif.placement.search import Search, TieEnumerator, choose
from ndif.schema.states import DeploymentLevel

_MAX_EVALUATIONS = 4096
"""Maximum number of nodes that a decision searches again if a replica has no place at first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A replica that has a place, and the cost of the place."""

    replica: PlacedReplica
    level: CandidateLevel
    """DEPLOYED if the replica was HOT before the decision."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The cluster after a decision, and its effects on models."""

    cluster: Cluster
    placed: tuple[Placement, ...] = ()
    """All HOT replicas of the demanded models; existing replicas come first for each model."""
    refused: tuple[PlacementRefusal, ...] = ()
    evictions: tuple[ReplicaKey, ...] = ()
    """Replicas that are no longer HOT."""

    def replica_ids(self, model_key: str) -> tuple[str, ...]:
        """Return the ids of the HOT replicas of a demanded model."""
        placed = (placement.replica for placement in self.placed)
        return tuple(d.replica_id for d in placed if d.model_key == model_key)


@dataclass(frozen=True, slots=True)
class Discovery:
    """Changes found by comparing the cluster with the existing nodes."""

    cluster: Cluster
    removed: tuple[str, ...] = ()
    """Ids of nodes that are lost, or came back with other memory."""
    lost: tuple[ReplicaKey, ...] = ()
    """Replicas on the removed nodes."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes by id, each with its replicas. Decides placement; a `Controller` carries out decisions."""

    nodes: Mapping[str, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, *nodes: Node) -> Cluster:
        """Return a cluster of these nodes."""
        return cls({node.id: node for node in nodes})

    # State

    def replicas(self) -> Iterator[PlacedReplica]:
        """Yield every replica, HOT or WARM."""
        for node in self.nodes.values():
            yield from node.replicas()

    def hot(self, model_key: str) -> list[PlacedReplica]:
        """Return the HOT replicas of a model."""
        return _hot(self.nodes, model_key)

    def find(self, key: ReplicaKey) -> PlacedReplica | None:
        """Return the replica with this key, HOT or WARM; None if it does not exist."""
        replicas = (node.find(key) for node in self.nodes.values())
        return next((replica for replica in replicas if replica is not None), None)

    # Decisions

    def deploy(
        self,
        demands: Sequence[Demand],
        now: float,
        rng: Random,
        rules: PlacementRules = DEFAULT_RULES,
    ) -> Decision:
        """Place as many missing replicas of the demands as fit.

        Dedicated models are placed first, then larger models before smaller ones. No model is evicted for
        another model of the same request. A dedicated demand makes the demanded number of replicas
        dedicated. If a model takes the only place of another, the search repeats with ties decided
        differently.
        """
        together = frozenset(demand.model_key for demand in demands)
        if len(together) < len(demands):
            raise ValueError("A model is demanded twice in one request.")
        ordered = sorted(demands, key=lambda demand: (not demand.dedicated, -demand.size_bytes))
        searches = [Search(demand, now, rules, together) for demand in ordered]
        best = self._deploy(searches, rng)
        if best.refused and self._might_fit(best, searches, rng):
            ways = TieEnumerator(rng)
            for _ in range(_MAX_EVALUATIONS // max(1, len(self.nodes))):
                decision = self._deploy(searches, ways)
                if len(decision.placed) > len(best.placed):
                    best = decision
                if not best.refused or not ways.next():
                    break
        return best

    def _deploy(self, searches: Iterable[Search], rng: Random) -> Decision:
        """Return the decision with ties decided by `rng`."""
        deploying = _DecisionState(dict(self.nodes))
        for search in searches:
            deploying.deploy(search, rng)
        return Decision(
            self._changed_to(deploying.nodes),
            tuple(deploying.placed),
            tuple(deploying.refused),
            tuple(deploying.evictions),
        )

    def _might_fit(self, decision: Decision, searches: Iterable[Search], rng: Random) -> bool:
        """Return True if a refused model would fit without the other models of the request."""
        if all(placement.level is CandidateLevel.DEPLOYED for placement in decision.placed):
            return False
        refused = {refusal.model_key for refusal in decision.refused}
        return any(
            choose(self.nodes, search, rng) is not None
            for search in searches
            if search.demand.model_key in refused
        )

    def evict(
        self,
        model_keys: Iterable[str] = (),
        replica_keys: Iterable[ReplicaKey] = (),
        to: DeploymentLevel = DeploymentLevel.WARM,
    ) -> Decision:
        """Evict models or single replicas, dedicated or not, on an operator's order.

        To WARM: HOT replicas become WARM if memory suffices, and WARM replicas stay. To COLD: the replicas
        are deleted. Unknown names are ignored.
        """
        if to is DeploymentLevel.HOT:
            raise ValueError("A replica cannot be evicted to HOT.")
        models, single = frozenset(model_keys), frozenset(replica_keys)
        nodes = dict(self.nodes)
        evictions: list[ReplicaKey] = []
        for node in self.nodes.values():
            evicted = [d for d in node.replicas() if d.model_key in models or d.key in single]
            hot = [d.key for d in evicted if d.level is DeploymentLevel.HOT]
            evictions += hot
            if to is DeploymentLevel.COLD:
                nodes[node.id] = node.without(replica.key for replica in evicted)
            else:
                nodes[node.id] = node.with_evicted(hot)
        return Decision(self._changed_to(nodes), evictions=tuple(evictions))

    def with_dedicated(self, model_key: str, replicas: int) -> Cluster:
        """Return the cluster with exactly this number of a model's HOT replicas dedicated."""
        nodes = dict(self.nodes)
        for position, replica in enumerate(_dedicated_first(self.hot(model_key))):
            node = nodes[replica.node_id]
            nodes[node.id] = node.with_dedicated(replica, position < replicas)
        return self._changed_to(nodes)

    def with_deployed(self, key: ReplicaKey, now: float) -> Cluster:
        """Return the cluster with a replica HOT since `now`, the time at which it came up."""
        replica = self.find(key)
        if replica is None or replica.level is not DeploymentLevel.HOT:
            return self
        node = self.nodes[replica.node_id].without([key])
        node = node.with_replica(replace(replica, deployed=now))
        return Cluster({**self.nodes, node.id: node})

    def with_nodes(self, discovered: Iterable[Node]) -> Discovery:
        """Return the cluster on the nodes that exist now; `discovered` nodes are without replicas.

        A node that was not discovered is lost with its replicas. A node whose memory differs was restarted,
        and also loses its replicas.
        """
        unmatched = {node.id: node for node in discovered}
        nodes: dict[str, Node] = {}
        removed, lost = [], []
        for old in self.nodes.values():
            node = unmatched.pop(old.id, None)
            if node is not None and node.resources.emptied() == old.resources.emptied():
                nodes[old.id] = old if node.name == old.name else replace(old, name=node.name)
                continue
            removed.append(old.id)
            lost += [replica.key for replica in old.replicas()]
            if node is not None:
                nodes[node.id] = node.emptied()
        for node in unmatched.values():
            nodes[node.id] = node.emptied()
        return Discovery(self._changed_to(nodes), tuple(removed), tuple(lost))

    def with_withdrawn(self, names: Set[str]) -> Cluster:
        """Return the cluster with exactly these GPUs withdrawn from placement; replicas on them stay."""
        nodes = {}
        for node in self.nodes.values():
            resources = node.resources
            indices = range(len(resources.gpu_bytes))
            failed = frozenset(index for index in indices if node.gpu_name(index) in names)
            if failed != resources.withdrawn:
                node = replace(node, resources=replace(resources, withdrawn=failed))
            nodes[node.id] = node
        return self._changed_to(nodes)

    def with_replica(self, replica: PlacedReplica) -> Cluster:
        """Return the cluster with an existing replica; raise if its node or memory is missing."""
        node = self.nodes[replica.node_id].with_replica(replica)
        return Cluster({**self.nodes, node.id: node})

    def without(self, replica_keys: Iterable[ReplicaKey]) -> Cluster:
        """Return the cluster without these replicas."""
        nodes = dict(self.nodes)
        keys = list(replica_keys)
        for node in self.nodes.values():
            nodes[node.id] = node.without(keys)
        return self._changed_to(nodes)

    def _changed_to(self, nodes: dict[str, Node]) -> Cluster:
        """Return a cluster of these nodes; this cluster if no node changed."""
        same = len(nodes) == len(self.nodes) and all(
            nodes.get(node_id) is node for node_id, node in self.nodes.items()
        )
        return self if same else Cluster(nodes)


def _hot(nodes: Mapping[str, Node], model_key: str) -> list[PlacedReplica]:
    return [d for node in nodes.values() for d in node.hot.get(model_key, {}).values()]


def _dedicated_first(replicas: Sequence[PlacedReplica]) -> list[PlacedReplica]:
    """Sort replicas by preference for being dedicated: dedicated replicas, then the oldest."""
    return sorted(replicas, key=lambda d: (not d.dedicated, d.deployed, d.replica_id))


class _DecisionState:
    """The state of a decision in progress: nodes with the replicas placed so far."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.placed: list[Placement] = []
        self.refused: list[PlacementRefusal] = []
        self.evictions: list[ReplicaKey] = []
        self._blocked_by: dict[str, int] = {}
        """CPU bytes of each node that WARM replicas free when they return to the GPUs."""

    def deploy(self, search: Search, rng: Random) -> None:
        """Place the missing replicas of one model."""
        demand = search.demand
        existing = _hot(self.nodes, demand.model_key)
        if demand.dedicated:
            for replica in _dedicated_first(existing)[: demand.replicas]:
                node = self.nodes[replica.node_id]
                self.nodes[node.id] = node.with_dedicated(replica, True)
            existing = _dedicated_first(_hot(self.nodes, demand.model_key))
        self.placed += [Placement(replica, CandidateLevel.DEPLOYED) for replica in existing]
        needed = max(0, demand.replicas - len(existing))
        for missing in range(needed, 0, -1):
            if not self._place(search, rng):
                # The next replica would fail for the same reason.
                self.refused.append(refuse(self.nodes, search, missing))
                return

    def _place(self, search: Search, rng: Random) -> bool:
        """Place one replica; return False if it does not fit."""
        choice = choose(self.nodes, search, rng)
        if choice is None:
            return False
        node, replica_id, candidate = choice
        demand, held = search.demand, self._blocked_by.get(node.id, 0)
        after = node.with_deployed(demand, replica_id, candidate, search.now, search.together, held)
        replica = after.hot[demand.model_key][replica_id]
        cached = node.warm.get(demand.model_key, {}).get(replica_id)
        if cached is not None and not cached.on_cpu:
            self._blocked_by[node.id] = held + cached.size_bytes
        self.nodes[node.id] = after
        self.placed.append(Placement(replica, candidate.level))
        self.evictions += [evicted.key for evicted in candidate.evictions]
        return True
