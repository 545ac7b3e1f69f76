"""Builders of small clusters. Sizes are in GiB, times in seconds before `NOW`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ndif.config.units import parse_gpus
from ndif.placement.cluster import Cluster, Decision
from ndif.placement.delta import DeploymentDelta
from ndif.placement.demand import DEFAULT_RULES, Demand, Device
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica, ReplicaKey
from ndif.placement.resources import Resources
from ndif.schema.states import DeploymentLevel

GiB = 1024**3
NOW = 1_000_000.0
OLD, YOUNG = 2 * 3600.0, 60.0
HOT, WARM, COLD = DeploymentLevel


def a_node(gpus: str = "", cpu: float = 100, node_id: str = "n1") -> Node:
    return Node(node_id, f"name-{node_id}", Resources.of(parse_gpus(gpus), int(cpu * GiB), 1.0))


def with_hot(
    node: Node,
    model: str,
    size: float,
    gpus: Sequence[int],
    *,
    share: bool = False,
    age: float = OLD,
    dedicated: bool = False,
    replica: str = "1",
) -> Node:
    """Add a HOT replica on whole GPUs, or on a share of one."""
    size_bytes = int(size * GiB)
    total = node.resources.gpu_bytes
    return node.with_replica(
        PlacedReplica(
            model_key=model,
            replica_id=f"{model}-{replica}",
            node_id=node.id,
            level=HOT,
            size_bytes=size_bytes,
            deployed=NOW - age,
            gpu_mem_bytes_by_id={index: size_bytes if share else total[index] for index in gpus},
            gpu_memory_fraction=size_bytes / total[gpus[0]] if share else None,
            dedicated=dedicated,
        )
    )


def with_cpu(
    node: Node,
    model: str,
    size: float,
    *,
    level: DeploymentLevel = HOT,
    on_cpu: bool = True,
    age: float = OLD,
    dedicated: bool = False,
    replica: str = "1",
) -> Node:
    """Add a replica in the node's CPU memory."""
    return node.with_replica(
        PlacedReplica(
            model_key=model,
            replica_id=f"{model}-{replica}",
            node_id=node.id,
            level=level,
            size_bytes=int(size * GiB),
            deployed=NOW - age,
            dedicated=dedicated,
            on_cpu=on_cpu,
        )
    )


def with_warm(node: Node, model: str, size: float, *, replica: str = "1") -> Node:
    """Add a WARM replica that returns to GPUs."""
    return with_cpu(node, model, size, level=WARM, on_cpu=False, replica=replica)


def want(
    model: str,
    size: float,
    replicas: int = 1,
    *,
    dedicated: bool = False,
    device: Device = Device.GPU,
) -> Demand:
    return Demand(model, int(size * GiB), replicas, dedicated, device)


def deploy(
    nodes: Sequence[Node] | Cluster, *demand: Demand, now: float = NOW, seed: int = 0
) -> Decision:
    cluster = nodes if isinstance(nodes, Cluster) else Cluster.of(*nodes)
    return cluster.deploy(demand, now, random.Random(seed), DEFAULT_RULES)


def evicted_models(decision: Decision) -> list[str]:
    """Return the models of the evicted replicas."""
    return [model_key for model_key, _ in decision.evictions]


def levels(cluster: Cluster) -> dict[str, str]:
    """Each replica's level, by its id."""
    return {d.replica_id: d.level.value for d in cluster.replicas()}


def warm(cluster: Cluster, model_key: str) -> list[PlacedReplica]:
    """The WARM replicas of a model."""
    return [r for node in cluster.nodes.values() for r in node.warm.get(model_key, {}).values()]


def apply_to(state: Cluster, delta: DeploymentDelta) -> Cluster:
    """The cluster after every change of a delta.

    Raises:
        KeyError: if a node of the delta does not exist.
        ValueError: if the memory of a node does not suffice.
    """
    changed: dict[str, dict[ReplicaKey, PlacedReplica]] = {}

    def on(replica: PlacedReplica) -> dict[ReplicaKey, PlacedReplica]:
        node_id = replica.node_id
        if node_id not in changed:
            changed[node_id] = {placed.key: placed for placed in state.nodes[node_id].replicas()}
        return changed[node_id]

    for replica in delta.to_delete:
        on(replica).pop(replica.key, None)
    for replica in delta.to_cache:
        on(replica)[replica.key] = replica.as_warm()
    for replica in (*delta.from_cache, *delta.to_create):
        on(replica)[replica.key] = replica
    nodes = dict(state.nodes)
    for node_id, replicas in changed.items():
        node = nodes[node_id].emptied()
        for replica in replicas.values():
            node = node.with_replica(replica)
        nodes[node_id] = node
    return Cluster(nodes)
