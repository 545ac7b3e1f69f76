"""A brute-force check: a replica is placed whenever the rules allow it, at the lowest level.

The rules are written here a second time, from their description, over plain numbers: nothing below `places`
knows how the cluster goes about it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from ndif.placement.cluster import Cluster
from ndif.placement.demand import DEFAULT_RULES, Demand, Device
from ndif.placement.node import Node
from ndif.placement.replica import CandidateLevel, PlacedReplica
from ndif.placement.resources import Resources
from ndif.schema.states import DeploymentLevel
from tests.fuzzing import examples
from tests.placement.worlds import warm

NOW = 10_000.0
MINIMUM_S = 3600.0

Place = tuple[bool, int]
"""The order of candidates, on the CPU or not and by level: the least wins."""


# By brute force


def gpu_room(node: Node, staying: Sequence[PlacedReplica], size: int) -> bool:
    """Return True if a model fits on GPUs of a node beside the `staying` replicas."""
    total = node.resources.gpu_bytes
    tenants: list[list[int]] = [[] for _ in total]
    for replica in staying:
        for index, held in replica.gpu_mem_bytes_by_id.items():
            tenants[index].append(held)
    context = node.resources.context_bytes
    memories = [
        gpu
        for index, gpu in enumerate(zip(total, tenants, strict=True))
        if index not in node.resources.withdrawn
    ]
    for memory, theirs in memories:
        used = sum(theirs)
        need = size + context
        available = memory - used >= 0.3 * memory
        if 3 * need <= memory and available and used + need <= 0.8 * memory:
            return True
    empty = [max(0, memory - context) for memory, theirs in memories if not theirs]
    return any(
        sum(chosen) >= size
        for count in range(1, len(empty) + 1)
        for chosen in itertools.combinations(empty, count)
    )


def cpu_room(node: Node, staying: Sequence[PlacedReplica], size: int) -> bool:
    """Return True if a model fits in the CPU memory of a node beside the `staying` replicas."""
    used = sum(d.size_bytes for d in staying if d.on_cpu or d.level is DeploymentLevel.WARM)
    return size <= node.resources.cpu_bytes - used


def subsets(items: Sequence[PlacedReplica]) -> Iterable[tuple[PlacedReplica, ...]]:
    for count in range(len(items) + 1):
        yield from itertools.combinations(items, count)


def goes(replica: PlacedReplica, demand: Demand, together: set[str], on_cpu: bool) -> bool:
    """Return True if a replica may be evicted for the demand."""
    if replica.level is DeploymentLevel.WARM:
        return on_cpu and replica.model_key not in together - {demand.model_key}
    ripe = demand.dedicated or NOW - replica.deployed >= MINIMUM_S
    return ripe and not replica.dedicated and replica.model_key not in together


def places(cluster: Cluster, demand: Demand, together: set[str]) -> set[Place]:
    """Return every possible placement."""
    reachable: set[Place] = set()
    kinds = {Device.GPU: [False], Device.CPU: [True], Device.AUTO: [False, True]}[demand.device]
    for node, on_cpu in itertools.product(cluster.nodes.values(), kinds):
        room = cpu_room if on_cpu else gpu_room
        replicas = list(node.replicas())
        movable = [d for d in replicas if goes(d, demand, together, on_cpu)]
        warm = [
            d
            for d in replicas
            if d.level is DeploymentLevel.WARM
            and d.model_key == demand.model_key
            and d.on_cpu == on_cpu
        ]
        for evicted in subsets(movable):
            staying = [d for d in replicas if d not in evicted]
            if room(node, staying, demand.size_bytes):
                reachable.add((on_cpu, 4 if evicted else 2))
            for replica in warm:
                if on_cpu:
                    reachable.add((on_cpu, 1))
                elif room(node, staying, replica.size_bytes):
                    reachable.add((on_cpu, 3 if evicted else 1))
    return reachable


def could_have_stayed(
    node: Node, evicted: Sequence[PlacedReplica], size: int, on_cpu: bool
) -> list[PlacedReplica]:
    """Return the evictions that were not needed, given the others."""
    room = cpu_room if on_cpu else gpu_room
    return [
        spared
        for spared in evicted
        if room(node, [d for d in node.replicas() if d not in evicted or d is spared], size)
    ]


# Any small cluster


def a_cluster(rng: random.Random) -> Cluster:
    """At most three nodes of three GPUs, and five replicas, each in a place that the rules allow."""
    nodes = []
    for index in range(rng.choice([1, 1, 2, 2, 3])):
        gpus = [rng.choice([10, 24, 24, 30, 80]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))]
        memory = rng.choice([0, 20, 60, 120])
        resources = Resources.of(gpus, memory, 1.0, context_bytes=rng.choice([0, 0, 1, 3, 11]))
        failed = frozenset(i for i in range(len(gpus)) if rng.random() < 0.1)
        resources = replace(resources, withdrawn=failed)
        nodes.append(Node(f"n{index}", f"n{index}", resources))
    replicas = rng.choice([0, 2, 3, 4, 5, 5, 5])
    for index in range(30):
        if sum(len(list(node.replicas())) for node in nodes) < replicas:
            position = rng.randrange(len(nodes))
            nodes[position] = one_more(nodes[position], str(index), rng)
    return Cluster.of(*nodes)


def one_more(node: Node, replica_id: str, rng: random.Random) -> Node:
    """Return the node with one more random replica, if it fits."""
    kind = rng.choice(["share", "share", "whole", "whole", "whole", "cpu", "warm", "warm cpu"])
    size = rng.randint(1, 60)
    gpus: dict[int, int] = {}
    fraction = None
    if kind in ("share", "whole"):
        total = node.resources.gpu_bytes
        order = rng.sample(range(len(total)), len(total))
        if kind == "share":
            size = rng.randint(1, 10)
            gpus = {i: size for i in order if shares(node, i, size)}
            gpus = dict([*gpus.items()][:1])
            fraction = size / total[next(iter(gpus))] if gpus else None
        else:
            empty = [i for i in order if node.resources.free_gpu_bytes[i] == total[i]]
            gpus = {i: total[i] for i in empty[: rng.choice([1, 1, 2, 3])]}
            size = min(size, sum(gpus.values()))
        if not gpus:
            return node
    elif not cpu_room(node, list(node.replicas()), size):
        return node
    level = DeploymentLevel.WARM if kind.startswith("warm") else DeploymentLevel.HOT
    return node.with_replica(
        PlacedReplica(
            model_key=rng.choice("abc"),
            replica_id=replica_id,
            node_id=node.id,
            level=level,
            size_bytes=size,
            deployed=NOW - rng.choice([0, 1000, 3599, MINIMUM_S, 5000, 9000]),
            gpu_mem_bytes_by_id=gpus,
            gpu_memory_fraction=fraction,
            dedicated=level is DeploymentLevel.HOT and rng.random() < 0.15,
            on_cpu=kind in ("cpu", "warm cpu"),
        )
    )


def shares(node: Node, index: int, size: int) -> bool:
    """Return True if a model may have its share of this GPU."""
    total = node.resources.gpu_bytes[index]
    used = sum(d.gpu_mem_bytes_by_id.get(index, 0) for d in node.replicas())
    return 3 * size <= total and used + size <= 0.8 * total and total - used >= 0.3 * total


def a_wish(rng: random.Random) -> Demand:
    return Demand(
        model_key=rng.choice("aabd"),
        size_bytes=rng.randint(1, rng.choice([8, 12, 24, 60, 150])),
        dedicated=rng.random() < 0.3,
        device=rng.choice([Device.GPU, Device.GPU, Device.CPU, Device.AUTO]),
    )


chances = st.integers(0, 2**64).map(random.Random)
"""Clusters are drawn at random: clusters that Hypothesis chooses are mostly empty."""


def one_more_of(cluster: Cluster, demand: Demand) -> Demand:
    return Demand(
        demand.model_key,
        demand.size_bytes,
        len(cluster.hot(demand.model_key)) + 1,
        demand.dedicated,
        demand.device,
    )


many = settings(max_examples=examples(8))


@many
@given(chances)
def test_replica_is_placed_at_lowest_level_if_any_place_exists(
    rng: random.Random,
) -> None:
    cluster = a_cluster(rng)
    demand = one_more_of(cluster, a_wish(rng))
    # Another model that is demanded together and already satisfied.
    others = [Demand("b", 1, 0)] if demand.model_key != "b" and rng.random() < 0.4 else []
    together = {demand.model_key, *(other.model_key for other in others)}
    ways = places(cluster, demand, together)
    event(f"on the CPU, level: {min(ways, default=None)}")
    decision = cluster.deploy([demand, *others], NOW, rng, DEFAULT_RULES)
    assert bool(decision.refused) == (not ways)
    if not ways:
        assert decision.evictions == ()
        assert {d.key: d.level for d in decision.cluster.replicas()} == {
            d.key: d.level for d in cluster.replicas()
        }
        return
    (placement,) = (p for p in decision.placed if p.level is not CandidateLevel.DEPLOYED)
    new = placement.replica
    assert (new.on_cpu, placement.level) == min(ways)
    before = cluster.nodes[new.node_id]
    candidate = before.evaluate(demand, new.replica_id, NOW, DEFAULT_RULES, together)
    if placement.level is CandidateLevel.FREE:
        room = cpu_room if new.on_cpu else gpu_room
        beside = {
            node.id: len(node.hot.get(demand.model_key, ()))
            for node in cluster.nodes.values()
            if room(node, list(node.replicas()), demand.size_bytes)
        }
        event(f"replicas beside it: {beside[new.node_id]}")
        assert beside[new.node_id] == min(beside.values())
    evicted = [*candidate.evictions, *candidate.dropped]
    event(f"replicas that go: {len(evicted)}")
    assert all(goes(d, demand, together, new.on_cpu) for d in evicted)
    assert could_have_stayed(before, evicted, new.size_bytes, new.on_cpu) == []


@given(chances)
def test_replicas_spread_over_nodes_evenly(rng: random.Random) -> None:
    nodes = (Node(f"n{i}", f"n{i}", Resources.of([24, 24], 60, 1.0)) for i in range(3))
    device = rng.choice([Device.GPU, Device.CPU])
    decision = Cluster.of(*nodes).deploy([Demand("a", 20, 4, device=device)], NOW, rng)
    of_node = Counter(replica.node_id for replica in decision.cluster.replicas())
    assert sorted(of_node.values()) == [1, 1, 2]


@given(chances)
def test_node_with_model_files_is_preferred_among_equals(rng: random.Random) -> None:
    nodes = [Node(f"n{i}", f"n{i}", Resources.of([24], 60, 1.0)) for i in range(5)]
    files_on = frozenset(rng.sample([node.id for node in nodes], 2))

    def places_of(replicas: int) -> list[str]:
        demand = Demand("a", 20, replicas, files_on=files_on)
        decision = Cluster.of(*nodes).deploy([demand], NOW, rng)
        return [replica.node_id for replica in decision.cluster.replicas()]

    assert set(places_of(1)) < files_on
    assert set(places_of(2)) == files_on
    # Files are fetched again sooner than a lost node is replaced.
    assert sorted(places_of(5)) == [node.id for node in nodes]


@many
@given(chances)
def test_refusal_states_true_reason(rng: random.Random) -> None:
    cluster = a_cluster(rng)
    demand = one_more_of(cluster, a_wish(rng))
    # A WARM replica returns with its own size; a refusal describes the demanded size.
    cluster = cluster.without(replica.key for replica in warm(cluster, demand.model_key))
    for refusal in cluster.deploy([demand], NOW, rng, DEFAULT_RULES).refused:
        if refusal.retry_after_s is not None:
            event("time will do")
            later = NOW + refusal.retry_after_s
            assert not cluster.deploy([demand], later, rng).refused
            assert cluster.deploy([demand], later - 0.5, rng).refused
        elif refusal.blockers:
            event("somebody has to go")
            without = cluster.without((o.model_key, o.replica_id) for o in refusal.blockers)
            assert not without.deploy([one_more_of(without, demand)], NOW, rng).refused
        else:
            event("too large")
            empty = Cluster.of(*(node.emptied() for node in cluster.nodes.values()))
            assert empty.deploy([demand], NOW, rng).refused
