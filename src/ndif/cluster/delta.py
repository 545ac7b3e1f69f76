"""What has to be done so that what exists becomes what was decided (specification, section 5.6)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ndif.cluster.cluster import Cluster
from ndif.cluster.deployment import Deployment, ReplicaKey
from ndif.cluster.level import DeploymentLevel


@dataclass(frozen=True, slots=True)
class DeploymentDelta:
    """The work, in the order in which it must be done.

    Delete, then cache: both free memory, and must have ended before anything else begins. Then those
    that return, then those that are made. If each decision is carried out before the next is made, no GPU
    and no node's memory is oversubscribed at any moment in between.
    """

    to_delete: tuple[Deployment, ...] = ()
    """As they exist."""
    to_cache: tuple[Deployment, ...] = ()
    """HOT to WARM. As they exist."""
    from_cache: tuple[Deployment, ...] = ()
    """WARM to HOT. As they are to be."""
    to_create: tuple[Deployment, ...] = ()
    """As they are to be."""

    def __bool__(self) -> bool:
        return bool(self.to_delete or self.to_cache or self.from_cache or self.to_create)

    def by_node(self) -> Mapping[str, DeploymentDelta]:
        """The part of the work that each node has."""
        parts: defaultdict[str, DeploymentDelta] = defaultdict(DeploymentDelta)
        for field in ("to_delete", "to_cache", "from_cache", "to_create"):
            for deployment in getattr(self, field):
                part = parts[deployment.node_id]
                more = {field: (*getattr(part, field), deployment)}
                parts[deployment.node_id] = replace(part, **more)
        return parts

    def steps(self, why: str) -> Iterator[str]:
        """What is done to each replica, for the log; `why` some have to go."""
        yield from (f"{each.name} is ended: {why}" for each in self.to_delete)
        yield from (f"{each.name} becomes WARM: {why}" for each in self.to_cache)
        yield from (f"{each.name} returns to {each.node_id}" for each in self.from_cache)
        yield from (f"{each.name} is loaded on {each.node_id}" for each in self.to_create)


def build(before: Cluster, after: Cluster) -> DeploymentDelta:
    """What makes `before`, which is what really exists, into `after`.

    A HOT replica that is to be on other GPUs is cached and returns; one that is to be on another node, or
    another kind of device, is deleted and made anew. One that is to be WARM and does not exist is not
    made: there is nothing to keep warm.
    """
    exist = {deployment.key: deployment for deployment in before.replicas()}
    wanted = {deployment.key: deployment for deployment in after.replicas()}
    to_delete, to_cache, from_cache, to_create = [], [], [], []
    for key, old in exist.items():
        new = wanted.get(key)
        if new is None or not _movable(old, new):
            to_delete.append(old)
        elif old.level is DeploymentLevel.HOT and not old.same_place(new):
            to_cache.append(old)
    for key, new in wanted.items():
        if new.level is not DeploymentLevel.HOT:
            continue
        there = exist.get(key)
        if there is None or not _movable(there, new):
            to_create.append(new)
        elif not there.same_place(new):
            from_cache.append(new)
    return DeploymentDelta(tuple(to_delete), tuple(to_cache), tuple(from_cache), tuple(to_create))


def _movable(old: Deployment, new: Deployment) -> bool:
    """Whether its process can become what it is to be."""
    return old.node_id == new.node_id and old.on_cpu == new.on_cpu


def apply_to(state: Cluster, delta: DeploymentDelta) -> Cluster:
    """What exists once all of it has been done.

    Raises:
        KeyError: if it speaks of a node that `state` does not know.
        ValueError: if the memory of a node does not suffice for it.
    """
    changed: dict[str, dict[ReplicaKey, Deployment]] = {}

    def on(deployment: Deployment) -> dict[ReplicaKey, Deployment]:
        node_id = deployment.node_id
        if node_id not in changed:
            changed[node_id] = {there.key: there for there in state.nodes[node_id].replicas()}
        return changed[node_id]

    for deployment in delta.to_delete:
        on(deployment).pop(deployment.key, None)
    for deployment in delta.to_cache:
        on(deployment)[deployment.key] = deployment.warm()
    for deployment in (*delta.from_cache, *delta.to_create):
        on(deployment)[deployment.key] = deployment
    nodes = dict(state.nodes)
    for node_id, replicas in changed.items():
        node = nodes[node_id].emptied()
        for deployment in replicas.values():
            node = node.with_replica(deployment)
        nodes[node_id] = node
    return Cluster(nodes)
