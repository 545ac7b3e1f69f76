"""Cluster: every node and every replica, and each decision about them, as pure functions.

Nothing changes a cluster. A decision returns another, which shares with it the nodes that it left alone;
what has to be done in the world is the difference between the two (`delta.build`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ndif.cluster.deployment import Deployment, ReplicaKey
from ndif.cluster.level import CandidateLevel, DeploymentLevel
from ndif.cluster.node import Node
from ndif.cluster.refusal import Refusal, refuse
from ndif.cluster.rules import DEFAULT_RULES, Rules
from ndif.cluster.search import Search, choose
from ndif.cluster.ties import Dice, EveryWay
from ndif.cluster.wanted import Wanted

_LOOKS = 4096
"""At how many nodes a decision looks again, in all, where not everybody has a place at first."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A replica that has its place, and what it took."""

    deployment: Deployment
    level: CandidateLevel
    """DEPLOYED where it was there before."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of the cluster, and what to tell those who asked or are displaced."""

    cluster: Cluster
    placed: tuple[Placement, ...] = ()
    """Every HOT replica of what was asked for, those that were there before first."""
    refused: tuple[Refusal, ...] = ()
    evictions: tuple[ReplicaKey, ...] = ()
    """Replicas that were HOT and are no longer."""

    def replica_ids(self, model_key: str) -> tuple[str, ...]:
        """The HOT replicas of a model that was asked for."""
        placed = (placement.deployment for placement in self.placed)
        return tuple(d.replica_id for d in placed if d.model_key == model_key)


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a look at the machines changes."""

    cluster: Cluster
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """Nodes that are gone, or came back as another machine."""
    lost: tuple[ReplicaKey, ...] = ()
    """Replicas that went with them."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Every node by its id."""

    nodes: Mapping[str, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, *nodes: Node) -> Cluster:
        """These nodes."""
        return cls({node.id: node for node in nodes})

    # What there is

    def replicas(self) -> Iterator[Deployment]:
        """Every replica, HOT or WARM."""
        for node in self.nodes.values():
            yield from node.replicas()

    def hot(self, model_key: str) -> list[Deployment]:
        """The replicas of a model that serve."""
        return _hot(self.nodes, model_key)

    def warm(self, model_key: str) -> list[Deployment]:
        """The replicas of a model that would return without reading a file."""
        nodes = self.nodes.values()
        return [d for node in nodes for d in node.cache.get(model_key, {}).values()]

    def find(self, key: ReplicaKey) -> Deployment | None:
        """The replica of this name, HOT or WARM."""
        found = (node.find(key) for node in self.nodes.values())
        return next((deployment for deployment in found if deployment is not None), None)

    def describe(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"nodes": [node.describe() for node in self.nodes.values()]}

    # Decisions

    def deploy(
        self,
        wanted: Sequence[Wanted],
        now: float,
        rng: Dice,
        rules: Rules = DEFAULT_RULES,
    ) -> Decision:
        """Find a place for every replica that is asked for and not there, as many as there is room for.

        Dedicated models come first, and of each kind the largest. Of what is asked for together nobody
        goes for another. A dedicated model makes as many of its replicas dedicated as it asks for. Where
        one takes the only place of another, places are looked for anew, with ties decided otherwise.

        Raises:
            ValueError: if a model is asked for twice.
        """
        together = frozenset(one.model_key for one in wanted)
        if len(together) < len(wanted):
            raise ValueError("A model was asked for twice in one request.")
        ordered = sorted(wanted, key=lambda w: (not w.dedicated, -w.size_bytes))
        searches = [Search(one, now, rules, together) for one in ordered]
        best = self._deploy(searches, rng)
        if best.refused and self._might_fit(best, searches, rng):
            ways = EveryWay(rng)
            for _ in range(_LOOKS // max(1, len(self.nodes))):
                found = self._deploy(searches, ways)
                if len(found.placed) > len(best.placed):
                    best = found
                if not best.refused or not ways.next():
                    break
        return best

    def _deploy(self, searches: Iterable[Search], rng: Dice) -> Decision:
        """One way to do it."""
        deploying = _Deploying(dict(self.nodes))
        for search in searches:
            deploying.deploy(search, rng)
        return Decision(
            self._or(deploying.nodes),
            tuple(deploying.placed),
            tuple(deploying.refused),
            tuple(deploying.evictions),
        )

    def _might_fit(self, decision: Decision, searches: Iterable[Search], rng: Dice) -> bool:
        """Whether some of what was refused has lost its place to what was placed with it."""
        if all(placement.level is CandidateLevel.DEPLOYED for placement in decision.placed):
            return False
        refused = {refusal.model_key for refusal in decision.refused}
        return any(
            choose(self.nodes, search, rng) is not None
            for search in searches
            if search.wanted.model_key in refused
        )

    def evict(
        self,
        model_keys: Iterable[str] = (),
        replica_keys: Iterable[ReplicaKey] = (),
        to: DeploymentLevel = DeploymentLevel.WARM,
    ) -> Decision:
        """End the service of models or single replicas: an operator's word, which dedication does not stop.

        To WARM: those that are HOT become WARM where memory suffices, and those that are WARM stay. To
        COLD: nothing is left of them. What does not exist is passed over.
        """
        if to is DeploymentLevel.HOT:
            raise ValueError("Nothing can be evicted to HOT.")
        models, single = frozenset(model_keys), frozenset(replica_keys)
        nodes = dict(self.nodes)
        evictions: list[ReplicaKey] = []
        for node in self.nodes.values():
            going = [d for d in node.replicas() if d.model_key in models or d.key in single]
            hot = [d.key for d in going if d.level is DeploymentLevel.HOT]
            evictions += hot
            if to is DeploymentLevel.COLD:
                nodes[node.id] = node.without(deployment.key for deployment in going)
            else:
                nodes[node.id] = node.with_evicted(hot)
        return Decision(self._or(nodes), evictions=tuple(evictions))

    def with_dedicated(self, model_key: str, replicas: int) -> Cluster:
        """So many HOT replicas of a model dedicated, and no others: nothing else about them changes."""
        nodes = dict(self.nodes)
        for position, deployment in enumerate(_dedicated_first(self.hot(model_key))):
            node = nodes[deployment.node_id]
            nodes[node.id] = node.with_dedicated([deployment.key], position < replicas)
        return self._or(nodes)

    def with_deployed(self, key: ReplicaKey, now: float) -> Cluster:
        """The cluster with a replica HOT since now, and no longer only decided to be."""
        deployment = self.find(key)
        if deployment is None or deployment.level is not DeploymentLevel.HOT:
            return self
        node = self.nodes[deployment.node_id].without([key])
        node = node.with_replica(replace(deployment, deployed=now))
        return Cluster({**self.nodes, node.id: node})

    def with_nodes(self, discovered: Iterable[Node]) -> Discovery:
        """The machines as they are now: `discovered`, each without replicas.

        One that is not among them is gone with all that was on it. So is one whose memory is another: it
        has been started anew.
        """
        found = {node.id: node for node in discovered}
        nodes: dict[str, Node] = {}
        added, removed, lost = [], [], []
        for known in self.nodes.values():
            node = found.pop(known.id, None)
            if node is not None and node.resources.emptied() == known.resources.emptied():
                nodes[known.id] = (
                    known if node.name == known.name else replace(known, name=node.name)
                )
                continue
            removed.append(known.id)
            lost += [deployment.key for deployment in known.replicas()]
            if node is not None:
                nodes[node.id] = node.emptied()
                added.append(node.id)
        for node in found.values():
            nodes[node.id] = node.emptied()
            added.append(node.id)
        return Discovery(self._or(nodes), tuple(added), tuple(removed), tuple(lost))

    def with_withdrawn(self, names: Set[str]) -> Cluster:
        """The cluster with these GPUs out of placement, and no others: who is on them stays."""
        nodes = {}
        for node in self.nodes.values():
            resources = node.resources
            indices = range(len(resources.gpu_bytes))
            failed = frozenset(index for index in indices if node.gpu_name(index) in names)
            if failed != resources.withdrawn:
                node = replace(node, resources=replace(resources, withdrawn=failed))
            nodes[node.id] = node
        return self._or(nodes)

    def with_replica(self, deployment: Deployment) -> Cluster:
        """The cluster with a replica that turned out to be there.

        Raises:
            KeyError: if its node is not.
            IndexError, ValueError: if what it holds of that is not.
        """
        node = self.nodes[deployment.node_id].with_replica(deployment)
        return Cluster({**self.nodes, node.id: node})

    def without(self, replica_keys: Iterable[ReplicaKey]) -> Cluster:
        """The cluster without replicas that turned out not to be: their process died, or never came up."""
        nodes = dict(self.nodes)
        keys = list(replica_keys)
        for node in self.nodes.values():
            nodes[node.id] = node.without(keys)
        return self._or(nodes)

    def _or(self, nodes: dict[str, Node]) -> Cluster:
        """Another cluster, or this one where nothing is different."""
        same = len(nodes) == len(self.nodes) and all(
            nodes.get(node_id) is node for node_id, node in self.nodes.items()
        )
        return self if same else Cluster(nodes)


def _hot(nodes: Mapping[str, Node], model_key: str) -> list[Deployment]:
    return [d for node in nodes.values() for d in node.deployments.get(model_key, {}).values()]


def _dedicated_first(replicas: Sequence[Deployment]) -> list[Deployment]:
    """Those that are dedicated, then the oldest: the order in which they are to be."""
    return sorted(replicas, key=lambda d: (not d.dedicated, d.deployed, d.replica_id))


class _Deploying:
    """A decision in the making."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.placed: list[Placement] = []
        self.refused: list[Refusal] = []
        self.evictions: list[ReplicaKey] = []
        self._held: dict[str, int] = {}
        """Of each node, what its returning replicas give back of its CPU memory, once they have left it."""

    def deploy(self, search: Search, rng: Dice) -> None:
        """Place what there is not of one model."""
        wanted = search.wanted
        there = _hot(self.nodes, wanted.model_key)
        if wanted.dedicated:
            there = self._dedicate(there, wanted.replicas)
        self.placed += [Placement(deployment, CandidateLevel.DEPLOYED) for deployment in there]
        needed = max(0, wanted.replicas - len(there))
        for still in range(needed, 0, -1):
            if not self._place(search, rng):
                # Nothing has changed that could help the next.
                self.refused.append(refuse(self.nodes, search, still))
                return

    def _dedicate(self, there: list[Deployment], replicas: int) -> list[Deployment]:
        """As many of a model's replicas dedicated as asked for: those that are, then the oldest."""
        ordered = _dedicated_first(there)
        for deployment in ordered[:replicas]:
            node = self.nodes[deployment.node_id]
            self.nodes[node.id] = node.with_dedicated([deployment.key], True)
        return [
            replace(deployment, dedicated=True) if position < replicas else deployment
            for position, deployment in enumerate(ordered)
        ]

    def _place(self, search: Search, rng: Dice) -> bool:
        """One replica; whether there was room."""
        choice = choose(self.nodes, search, rng)
        if choice is None:
            return False
        node, candidate = choice.node, choice.candidate
        held = self._held.get(node.id, 0)
        after = node.with_deployed(
            search.wanted, choice.replica_id, candidate, search.now, search.together, held
        )
        deployment = after.deployments[search.wanted.model_key][choice.replica_id]
        cached = node.cache.get(search.wanted.model_key, {}).get(choice.replica_id)
        if cached is not None and not cached.on_cpu:
            self._held[node.id] = held + cached.size_bytes
        self.nodes[node.id] = after
        self.placed.append(Placement(deployment, candidate.level))
        self.evictions += [gone.key for gone in candidate.evictions]
        return True
