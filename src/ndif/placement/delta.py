"""The changes that turn the actual cluster into the decided one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ndif.placement.cluster import Cluster
from ndif.placement.replica import PlacedReplica
from ndif.schema.states import DeploymentLevel


@dataclass(frozen=True, slots=True)
class DeploymentDelta:
    """Replicas to change, in the order of the changes.

    Replicas are first deleted and cached, which frees memory and must end before other changes begin; then
    they are returned and created. If each decision is carried out before the next one, no GPU and no node's
    memory is oversubscribed at any time.
    """

    to_delete: tuple[PlacedReplica, ...] = ()
    """Replicas in their actual state."""
    to_cache: tuple[PlacedReplica, ...] = ()
    """Replicas to move from HOT to WARM, in their actual state."""
    from_cache: tuple[PlacedReplica, ...] = ()
    """Replicas to move from WARM to HOT, in their decided state."""
    to_create: tuple[PlacedReplica, ...] = ()
    """Replicas in their decided state."""

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
    """Return the changes that turn `before`, the actual replicas, into `after`.

    A HOT replica that moves to other GPUs is cached and returned. A replica that moves to another node, or
    to another kind of device, is deleted and created again. A missing WARM replica is not created.
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
