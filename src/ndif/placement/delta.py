"""The changes that lead from the cluster as it is to the cluster as it was decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ndif.placement.cluster import Cluster
from ndif.placement.replica import PlacedReplica
from ndif.schema.states import DeploymentLevel


@dataclass(frozen=True, slots=True)
class DeploymentDelta:
    """Replicas to change, in the order of the changes.

    Delete, then cache: both free memory, and must have ended before anything else begins. Then return, then
    create. If each decision is carried out before the next is made, no GPU and no node's memory is
    oversubscribed at any moment in between.
    """

    to_delete: tuple[PlacedReplica, ...] = ()
    """Replicas as they exist."""
    to_cache: tuple[PlacedReplica, ...] = ()
    """HOT to WARM; replicas as they exist."""
    from_cache: tuple[PlacedReplica, ...] = ()
    """WARM to HOT; replicas as they will be."""
    to_create: tuple[PlacedReplica, ...] = ()
    """Replicas as they will be."""

    def __bool__(self) -> bool:
        return bool(self.to_delete or self.to_cache or self.from_cache or self.to_create)

    def by_node(self) -> Mapping[str, DeploymentDelta]:
        """Return the changes of each node."""
        changes = (self.to_delete, self.to_cache, self.from_cache, self.to_create)
        return {
            node_id: DeploymentDelta(
                *(
                    tuple(replica for replica in change if replica.node_id == node_id)
                    for change in changes
                )
            )
            for node_id in dict.fromkeys(
                replica.node_id for change in changes for replica in change
            )
        }

    def steps(self, why: str) -> Iterator[str]:
        """Yield a log line for each change; `why` is the reason for evictions."""
        yield from (f"{replica.name} is ended: {why}" for replica in self.to_delete)
        yield from (f"{replica.name} becomes WARM: {why}" for replica in self.to_cache)
        yield from (f"{replica.name} returns to {replica.node_id}" for replica in self.from_cache)
        yield from (f"{replica.name} is loaded on {replica.node_id}" for replica in self.to_create)


def build(before: Cluster, after: Cluster) -> DeploymentDelta:
    """Return the changes that make `before`, the replicas that exist, into `after`.

    A HOT replica that moves to other GPUs is cached and returns; one that moves to another node, or another
    kind of device, is deleted and created anew. A WARM replica that does not exist is not created.
    """
    exist = {replica.key: replica for replica in before.replicas()}
    demand = {replica.key: replica for replica in after.replicas()}
    to_delete, to_cache, from_cache, to_create = [], [], [], []
    for key, old in exist.items():
        new = demand.get(key)
        if new is None or not _movable(old, new):
            to_delete.append(old)
        elif old.level is DeploymentLevel.HOT and not old.has_same_place(new):
            to_cache.append(old)
    for key, new in demand.items():
        if new.level is not DeploymentLevel.HOT:
            continue
        existing = exist.get(key)
        if existing is None or not _movable(existing, new):
            to_create.append(new)
        elif not existing.has_same_place(new):
            from_cache.append(new)
    return DeploymentDelta(tuple(to_delete), tuple(to_cache), tuple(from_cache), tuple(to_create))


def _movable(old: PlacedReplica, new: PlacedReplica) -> bool:
    """Return True if the process of `old` can serve as `new`."""
    return old.node_id == new.node_id and old.on_cpu == new.on_cpu
