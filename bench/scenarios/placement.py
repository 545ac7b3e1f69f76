"""The time of one placement decision: 1,000 nodes of 8 GPUs with 5,000 deployments."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

from bench.figures import Figure
from bench.scenario import Site
from ndif.placement.cluster import Cluster
from ndif.placement.demand import DEFAULT_RULES, Demand, Device
from ndif.placement.node import Node
from ndif.placement.refusal import explain_refusal
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.schema.states import DeploymentLevel

_GIB = 1024**3
_NODES = 1000
_GPUS = (80 * _GIB,) * 8
_NOW = 1e6
_LIMIT_MS = 20.0
_DECISIONS = 30


def measure(_: Site) -> list[Figure]:
    """Measure a placement on free GPUs, a placement with evictions, and a refusal with reasons."""
    return [
        _figure("finds room", [1, 1, 1, 1, 1], 60),
        _figure("must evict", [1, 1, 2, 2, 2], 140),
        _figure("cannot be placed", [1, 1, 2, 2, 2], 600, kept=True),
    ]


def _figure(outcome: str, gpus: list[int], size_gib: int, *, kept: bool = False) -> Figure:
    """Measure decisions that each start from the previous one's result; the first has no history."""
    rng = random.Random(0)
    cluster = _cluster(gpus, rng, kept=kept)
    took = []
    for index in range(_DECISIONS):
        demand = Demand(f"new-{index}", size_gib * _GIB, device=Device.GPU)
        began = time.perf_counter()
        decision = cluster.deploy([demand], _NOW, rng, DEFAULT_RULES)
        reasons = [explain_refusal(refusal) for refusal in decision.refused]
        took.append((time.perf_counter() - began) * 1e3)
        if bool(reasons) != kept or bool(decision.evictions) != (outcome == "must evict"):
            raise RuntimeError(f"The decision is not one that {outcome}.")
        cluster = decision.cluster
    return Figure(
        f"one decision that {outcome}",
        statistics.median(took),
        _LIMIT_MS,
        "ms",
        how=f"{_NODES} nodes, {_NODES * len(gpus)} replicas; median of {_DECISIONS}, "
        f"the first {took[0]:.1f}, the slowest after it {max(took[1:]):.1f}",
    )


def _cluster(gpus: list[int], rng: random.Random, *, kept: bool) -> Cluster:
    """Return nodes with a replica for each number of `gpus`; `kept`: most replicas are still protected."""
    nodes = []
    for index in range(_NODES):
        node = Node(f"node-{index}", f"node-{index}", Resources.of(_GPUS, 1024 * _GIB))
        first = 0
        for position, count in enumerate(gpus):
            name = f"{index}-{position}"
            replica = PlacedReplica(
                model_key=f"model-{rng.randrange(_NODES)}",
                replica_id=name,
                node_id=node.id,
                level=DeploymentLevel.HOT,
                size_bytes=count * 60 * _GIB,
                deployed=_NOW - rng.uniform(0, 4000 if kept else 0) - (0 if kept else 7200),
                gpu_mem_bytes_by_id=dict.fromkeys(range(first, first + count), _GPUS[0]),
            )
            if kept and index % 2 and position == 0:
                replica = replace(replica, dedicated=True)
            node = node.with_replica(replica)
            first += count
        nodes.append(node)
    return Cluster.of(*nodes)
