"""Joint placement: models requested together are all placed whenever possible (by brute force)."""

from __future__ import annotations

import itertools
import random

from hypothesis import event, given, settings
from hypothesis import strategies as st

from ndif.placement.cluster import Cluster
from ndif.placement.demand import Demand, Device
from ndif.placement.node import Node
from ndif.placement.resources import Resources
from ndif.placement.search import TieEnumerator
from tests.fuzzing import examples

NOW = 10_000.0


def all_fit(nodes: list[int], sizes: list[int]) -> bool:
    """Return True if the models can all be placed on these nodes."""
    return any(
        all(
            sum(size for size, at in zip(sizes, places, strict=True) if at == index) <= room
            for index, room in enumerate(nodes)
        )
        for places in itertools.product(range(len(nodes)), repeat=len(sizes))
    )


@settings(max_examples=examples(2))
@given(st.integers(0, 2**64).map(random.Random))
def test_models_are_all_placed_whenever_possible(rng: random.Random) -> None:
    rooms = [rng.randint(1, 12) for _ in range(rng.choice([1, 2, 2, 3]))]
    sizes = [rng.randint(1, 8) for _ in range(rng.choice([1, 2, 3, 4]))]
    nodes = (Node(str(i), str(i), Resources.of([], room, 1.0)) for i, room in enumerate(rooms))
    demand = [Demand(str(i), size, device=Device.CPU) for i, size in enumerate(sizes)]
    decision = Cluster.of(*nodes).deploy(demand, NOW, rng)
    possible = all_fit(rooms, sizes)
    event(f"all fit: {possible}")
    assert (not decision.refused) == possible


def test_small_model_leaves_only_large_gpu_to_large_model() -> None:
    cluster = Cluster.of(
        Node("a", "a", Resources.of([80], 0, 1.0)), Node("b", "b", Resources.of([30, 30], 0, 1.0))
    )
    demand = [
        Demand(key, size, device=Device.GPU) for key, size in (("x", 60), ("y", 30), ("z", 30))
    ]
    for seed in range(50):
        decision = cluster.deploy(demand, NOW, random.Random(seed))
        assert not decision.refused
        assert {p.replica.node_id for p in decision.placed if p.replica.size_bytes == 30} == {"b"}


def test_tie_enumerator_visits_every_choice_once() -> None:
    ways = TieEnumerator(random.Random(0))
    order = []
    while True:
        first = ways.choice("ab")
        order.append(first + (ways.choice("cde") if first == "a" else ""))
        if not ways.next():
            break
    assert order == ["ac", "ad", "ae", "b"]
