"""Node: what one machine has, what is on it, and what it would do for one more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ndif.cluster.deployment import Deployment, ReplicaKey
from ndif.cluster.eviction import in_order, least, make_way, may_go, smallest_first
from ndif.cluster.ledger import CpuLedger, GpuLedger
from ndif.cluster.level import CandidateLevel, DeploymentLevel
from ndif.cluster.outlook import NOBODY, Outlook, Replicas
from ndif.cluster.packing import assign
from ndif.cluster.resources import Resources
from ndif.cluster.rules import Rules
from ndif.cluster.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a node would do for a replica."""

    level: CandidateLevel
    on_cpu: bool = False
    gpu_mem_bytes_by_id: Mapping[int, int] = field(default_factory=dict)
    gpu_memory_fraction: float | None = None
    evictions: tuple[Deployment, ...] = ()
    """HOT replicas that have to go."""
    dropped: tuple[Deployment, ...] = ()
    """WARM replicas that have to go for one on the CPU; `Node.with_evicted` finds those for others."""


_NO = Candidate(CandidateLevel.CANT_ACCOMMODATE)


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. Nothing changes it: what would, returns another that shares the rest with it.

    CPU memory is for WARM replicas and for those that run on the CPU. One that does the latter keeps its
    memory and its process when it becomes WARM, so that this frees nothing: to make room on the CPU it is
    deleted instead.
    """

    id: str
    name: str
    resources: Resources
    deployments: Replicas = field(default_factory=dict)
    """HOT replicas."""
    cache: Replicas = field(default_factory=dict)
    """WARM replicas."""
    _outlook: Outlook | None = field(default=None, init=False, repr=False, compare=False)

    def outlook(self, rules: Rules) -> Outlook:
        """The quick look at it, remembered: no outcome depends on whether it was."""
        known = self._outlook
        if known is None or not (known.rules is rules or known.rules == rules):
            known = Outlook(self.resources, self.deployments, self.cache, rules)
            object.__setattr__(self, "_outlook", known)
        return known

    def gpu_name(self, index: int) -> str:
        """Name a GPU in the whole cluster, if it can be for as long as the card exists."""
        return self.resources.gpu_uuids[index] or f"GPU {index} of {self.id}"

    def replicas(self) -> Iterator[Deployment]:
        """Every replica, HOT ones first."""
        for level in (self.deployments, self.cache):
            for replicas in level.values():
                yield from replicas.values()

    def find(self, key: ReplicaKey) -> Deployment | None:
        """The replica of this name, HOT or WARM."""
        model_key, replica_id = key
        hot = self.deployments.get(model_key, {}).get(replica_id)
        return hot or self.cache.get(model_key, {}).get(replica_id)

    def evaluate(
        self,
        wanted: Wanted,
        replica_id: str,
        now: float,
        rules: Rules,
        together: Set[str] = NOBODY,
    ) -> Candidate:
        """What it would do for this replica. Nobody goes of the models asked for `together` with it.

        A replica that is WARM here returns to the kind of device it came from, with the size it has.
        """
        if replica_id in self.deployments.get(wanted.model_key, {}):
            return Candidate(CandidateLevel.DEPLOYED)
        warm = self.cache.get(wanted.model_key, {}).get(replica_id)
        displaces = rules.displaces(now, dedicated=wanted.dedicated)
        for on_cpu in wanted.on_cpu:
            if warm is not None and warm.on_cpu != on_cpu:
                continue
            if not on_cpu:
                size = wanted.size_bytes if warm is None else warm.size_bytes
                candidate = self._on_gpus(size, displaces, together, rules)
            elif warm is not None:
                return Candidate(CandidateLevel.CACHED_AND_FREE, on_cpu=True)
            else:
                candidate = self._on_cpu(wanted, displaces, together)
            if candidate.level is not CandidateLevel.CANT_ACCOMMODATE:
                return replace(candidate, level=_level(candidate, warm is not None))
        return _NO

    def _on_gpus(
        self, size_bytes: int, displaces: float, together: Set[str], rules: Rules
    ) -> Candidate:
        resources = self.resources
        evictions: list[Deployment] = []
        assignment = assign(resources, size_bytes, rules)
        if assignment is None:
            hot = (d for replicas in self.deployments.values() for d in replicas.values())
            movable = in_order(d for d in hot if not d.on_cpu and may_go(d, displaces, together))
            found = least(movable, GpuLedger(resources, rules), size_bytes)
            if found is None:
                return _NO
            evictions = found
            for deployment in evictions:
                resources = resources.given_back(deployment.gpu_mem_bytes_by_id, 0)
            assignment = assign(resources, size_bytes, rules)
            if assignment is None:
                return _NO
        return Candidate(
            CandidateLevel.FREE,
            gpu_mem_bytes_by_id=assignment.gpu_mem_bytes_by_id,
            gpu_memory_fraction=assignment.gpu_memory_fraction,
            evictions=tuple(evictions),
        )

    def _on_cpu(self, wanted: Wanted, displaces: float, together: Set[str]) -> Candidate:
        hot = (d for replicas in self.deployments.values() for d in replicas.values())
        # What is WARM of its own model could not return, or it would have been asked to instead.
        spared = together - {wanted.model_key}
        ordered = [
            *smallest_first(self._cached(spared)),
            *in_order(d for d in hot if d.on_cpu and may_go(d, displaces, together)),
        ]
        going = least(ordered, CpuLedger(self.resources.free_cpu_bytes), wanted.size_bytes)
        if going is None:
            return _NO
        return Candidate(
            CandidateLevel.FREE,
            on_cpu=True,
            evictions=tuple(d for d in going if d.level is DeploymentLevel.HOT),
            dropped=tuple(d for d in going if d.level is DeploymentLevel.WARM),
        )

    def _cached(self, spared: Set[str]) -> Iterator[Deployment]:
        for model_key, replicas in self.cache.items():
            if model_key not in spared:
                yield from replicas.values()

    def with_deployed(
        self,
        wanted: Wanted,
        replica_id: str,
        candidate: Candidate,
        now: float,
        together: Set[str] = NOBODY,
        held_bytes: int = 0,
    ) -> Node:
        """This node with the replica HOT as `candidate` has it, and without what has to go for it."""
        if candidate.level is CandidateLevel.DEPLOYED:
            return self
        gone = [deployment.key for deployment in candidate.evictions]
        if candidate.on_cpu:
            node = self.without([*gone, *(deployment.key for deployment in candidate.dropped)])
        else:
            # While others leave their GPUs, what is to return to them is still WARM and takes its memory.
            spared = together | {wanted.model_key}
            node = self.with_evicted(gone, spared, held_bytes) if gone else self
        warm = self.cache.get(wanted.model_key, {}).get(replica_id)
        deployment = Deployment(
            model_key=wanted.model_key,
            replica_id=replica_id,
            node_id=self.id,
            level=DeploymentLevel.HOT,
            size_bytes=wanted.size_bytes if warm is None else warm.size_bytes,
            deployed=now,
            gpu_mem_bytes_by_id=candidate.gpu_mem_bytes_by_id,
            gpu_memory_fraction=candidate.gpu_memory_fraction,
            dedicated=wanted.dedicated,
            on_cpu=candidate.on_cpu,
        )
        return node.without([deployment.key]).with_replica(deployment)

    def with_evicted(
        self, keys: Iterable[ReplicaKey], spared: Set[str] = NOBODY, held_bytes: int = 0
    ) -> Node:
        """This node with these HOT replicas WARM, or gone where CPU memory does not suffice.

        The smallest WARM replicas are dropped for them, none of models that are `spared`. `held_bytes` look
        free and are not: a replica gives them back only after these have become WARM.
        """
        node = self
        found = [self.deployments.get(model, {}).get(replica) for model, replica in keys]
        for deployment in smallest_first(d for d in found if d is not None):
            cached = node._cached(spared)
            node = node.without([deployment.key])
            free = node.resources.free_cpu_bytes - held_bytes
            # On the CPU its memory is its own already: nothing has to be found for it.
            dropped = [] if deployment.on_cpu else make_way(cached, free, deployment.size_bytes)
            if dropped is not None:
                node = node.without(d.key for d in dropped).with_replica(deployment.warm())
        return node

    def with_dedicated(self, keys: Iterable[ReplicaKey], dedicated: bool) -> Node:
        """This node with these HOT replicas dedicated, or no longer."""
        node = self
        for key in keys:
            deployment = self.deployments.get(key[0], {}).get(key[1])
            if deployment is not None and deployment.dedicated != dedicated:
                node = node.without([key]).with_replica(replace(deployment, dedicated=dedicated))
        return node

    def with_replica(self, deployment: Deployment) -> Node:
        """This node with one replica more, as it is.

        Raises:
            ValueError: if the memory is not there.
        """
        resources = self.resources.taken(deployment.gpu_mem_bytes_by_id, deployment.cpu_bytes)
        if deployment.level is DeploymentLevel.HOT:
            more = _with(self.deployments, deployment)
            return replace(self, resources=resources, deployments=more)
        return replace(self, resources=resources, cache=_with(self.cache, deployment))

    def without(self, keys: Iterable[ReplicaKey]) -> Node:
        """This node without these replicas, HOT or WARM; what they held is free."""
        node = self
        for key in keys:
            deployment = node.find(key)
            if deployment is None:
                continue
            node = replace(
                node,
                resources=node.resources.given_back(
                    deployment.gpu_mem_bytes_by_id, deployment.cpu_bytes
                ),
                deployments=_without(node.deployments, key),
                cache=_without(node.cache, key),
            )
        return node

    def emptied(self) -> Node:
        """This node with nothing on it."""
        return Node(self.id, self.name, self.resources.emptied())

    def describe(self) -> dict[str, Any]:
        """It, for JSON."""
        hot = (d for replicas in self.deployments.values() for d in replicas.values())
        return {
            "id": self.id,
            "name": self.name,
            "resources": self.resources.describe(),
            "deployments": [deployment.describe() for deployment in hot],
            "cache": [deployment.describe() for deployment in self._cached(NOBODY)],
        }


def _level(candidate: Candidate, warm: bool) -> CandidateLevel:
    if candidate.evictions or candidate.dropped:
        return CandidateLevel.CACHED_AND_FULL if warm else CandidateLevel.FULL
    return CandidateLevel.CACHED_AND_FREE if warm else CandidateLevel.FREE


def _with(replicas: Replicas, deployment: Deployment) -> Replicas:
    mine = replicas.get(deployment.model_key, {})
    return {**replicas, deployment.model_key: {**mine, deployment.replica_id: deployment}}


def _without(replicas: Replicas, key: ReplicaKey) -> Replicas:
    model_key, replica_id = key
    if replica_id not in replicas.get(model_key, {}):
        return replicas
    mine = {other: d for other, d in replicas[model_key].items() if other != replica_id}
    others = {other: theirs for other, theirs in replicas.items() if other != model_key}
    return {**others, model_key: mine} if mine else others
