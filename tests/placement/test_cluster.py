"""Decisions over all nodes."""

from __future__ import annotations

import random

import pytest

from ndif.placement.cluster import Cluster
from ndif.placement.demand import Device
from ndif.placement.node import Node
from ndif.placement.replica import CandidateLevel
from ndif.placement.resources import Resources
from tests.placement.worlds import (
    COLD,
    HOT,
    NOW,
    YOUNG,
    GiB,
    a_node,
    deploy,
    evicted_models,
    levels,
    want,
    warm,
    with_cpu,
    with_hot,
    with_warm,
)


def first_candidate(nodes: list[Node], **demand: object) -> tuple[str, CandidateLevel]:
    """Return the node and the candidate level of one more replica of "a"."""
    decision = deploy(nodes, want("a", 20, **demand))  # type: ignore[arg-type]
    placement = decision.placed[-1]
    return placement.replica.node_id, placement.level


# Which node


def test_lowest_candidate_level_wins() -> None:
    cached_and_free = with_warm(a_node("1x24GiB", node_id="n1"), "a", 20)
    free = a_node("1x24GiB", node_id="n2")
    full = with_hot(a_node("1x24GiB", node_id="n3"), "b", 20, [0])
    cached_and_full = with_hot(with_warm(a_node("1x24GiB", node_id="n4"), "a", 20), "c", 20, [0])
    small = a_node("1x12GiB", node_id="n5")
    nodes = [small, full, cached_and_full, free, cached_and_free]
    assert first_candidate(nodes) == ("n1", CandidateLevel.CACHED_AND_FREE)
    assert first_candidate(nodes[:4]) == ("n2", CandidateLevel.FREE)
    assert first_candidate(nodes[:3]) == ("n4", CandidateLevel.CACHED_AND_FULL)
    assert first_candidate(nodes[:2]) == ("n3", CandidateLevel.FULL)
    assert not deploy(nodes[:1], want("a", 20)).placed


def test_equal_nodes_are_chosen_at_random_by_seed() -> None:
    nodes = [a_node("1x24GiB", node_id=f"n{i}") for i in range(8)]
    chosen = [deploy(nodes, want("a", 20), seed=seed).placed[0] for seed in range(40)]
    assert len({placement.replica.node_id for placement in chosen}) > 4
    assert deploy(nodes, want("a", 20), seed=3) == deploy(nodes, want("a", 20), seed=3)


def test_any_gpu_is_preferred_to_cpu() -> None:
    cpu_only, full = a_node(node_id="n1"), with_hot(a_node("1x24GiB", node_id="n2"), "b", 20, [0])
    assert first_candidate([cpu_only, full], device=Device.AUTO) == ("n2", CandidateLevel.FULL)
    kept = with_hot(a_node("1x24GiB", node_id="n2", cpu=1), "b", 20, [0], dedicated=True)
    assert first_candidate([cpu_only, kept], device=Device.AUTO) == ("n1", CandidateLevel.FREE)
    assert not deploy([cpu_only, kept], want("a", 20, device=Device.GPU)).placed


# Which replicas


def test_serving_replicas_count_and_only_missing_ones_are_created() -> None:
    node = with_hot(a_node("4x24GiB"), "a", 20, [0])
    decision = deploy([node], want("a", 20, 3))
    assert [p.level for p in decision.placed] == [
        CandidateLevel.DEPLOYED,
        CandidateLevel.FREE,
        CandidateLevel.FREE,
    ]
    assert decision.replica_ids("a")[0] == "a-1"
    assert len(set(decision.replica_ids("a"))) == 3


def test_smaller_demand_ends_no_replica() -> None:
    cluster = Cluster.of(with_hot(with_hot(a_node("4x24GiB"), "a", 20, [0]), "b", 20, [1]))
    decision = deploy(cluster, want("a", 20, 1), want("b", 20, 0))
    assert decision.cluster is cluster
    assert decision.replica_ids("a") == ("a-1",)


def test_warm_replicas_return_in_place_before_new_ones_are_created() -> None:
    first = with_warm(a_node("1x24GiB", node_id="n1"), "a", 20, replica="1")
    second = with_warm(a_node("1x24GiB", node_id="n2"), "a", 20, replica="2")
    other = a_node("4x24GiB", node_id="n3")
    decision = deploy([other, first, second], want("a", 20, 3))
    placed = {p.replica.replica_id: (p.replica.node_id, p.level) for p in decision.placed}
    assert placed.pop("a-1") == ("n1", CandidateLevel.CACHED_AND_FREE)
    assert placed.pop("a-2") == ("n2", CandidateLevel.CACHED_AND_FREE)
    assert list(placed.values()) == [("n3", CandidateLevel.FREE)]
    assert not list(warm(decision.cluster, "a"))


def test_blocked_warm_replica_stays_warm_and_new_one_is_created_elsewhere() -> None:
    stuck = with_warm(a_node("1x24GiB", node_id="n1"), "a", 20)
    stuck = with_hot(stuck, "b", 20, [0], dedicated=True)
    decision = deploy([stuck, a_node("1x24GiB", node_id="n2")], want("a", 20))
    (new,) = decision.replica_ids("a")
    assert levels(decision.cluster) == {"a-1": "WARM", "b-1": "HOT", new: "HOT"}


def test_new_replica_id_is_unique() -> None:
    class Repeating(random.Random):
        def getrandbits(self, k: int) -> int:
            return drawn.pop() if k == 128 else super().getrandbits(k)

    drawn = [7, 7]
    first = Cluster.of(a_node("4x24GiB")).deploy([want("a", 20)], NOW, Repeating(0))
    assert not drawn[1:]
    drawn = [8, 7, 7]
    second = first.cluster.deploy([want("b", 20)], NOW, Repeating(0))
    assert not drawn
    assert second.replica_ids("b")[0] != first.replica_ids("a")[0]
    assert len(second.replica_ids("b")[0]) == 32


# Several models


def test_largest_model_is_placed_first() -> None:
    # In the other order, "small" might take the large GPU.
    node = a_node("1x80GiB,1x24GiB")
    node = with_hot(node, "kept", 20, [1], dedicated=True)
    decision = deploy([node], want("small", 40), want("large", 70))
    assert decision.replica_ids("large")
    assert [refusal.model_key for refusal in decision.refused] == ["small"]


def test_dedicated_model_is_placed_before_larger_one() -> None:
    decision = deploy([a_node("1x80GiB")], want("large", 70), want("kept", 40, dedicated=True))
    assert decision.replica_ids("kept")
    assert [refusal.model_key for refusal in decision.refused] == ["large"]


def test_models_demanded_together_do_not_evict_each_other() -> None:
    node = with_hot(with_hot(a_node("2x24GiB"), "a", 20, [0]), "b", 20, [1])
    assert evicted_models(deploy([node], want("c", 20), want("a", 20))) == ["b"]
    decision = deploy([node], want("c", 20), want("a", 20), want("b", 20))
    assert evicted_models(decision) == []
    assert [refusal.model_key for refusal in decision.refused] == ["c"]
    assert evicted_models(deploy([node], want("a", 20, 3))) == ["b"]


def test_duplicate_demand_is_rejected() -> None:
    with pytest.raises(ValueError, match="twice"):
        deploy([a_node()], want("a", 1), want("a", 2))


def test_fitting_replicas_are_placed_and_rest_is_refused_once() -> None:
    decision = deploy([a_node("2x24GiB"), a_node("1x24GiB", node_id="n2")], want("a", 20, 5))
    assert len(decision.placed) == 3
    (refusal,) = decision.refused
    assert refusal.replicas == 2


def test_cpu_memory_of_returning_replica_is_not_given_to_evicted_one() -> None:
    # "a" returns to GPU 0. "b" evicts "old" from GPU 1; CPU memory for it is free only once "a" has left.
    node = with_warm(a_node("1x80GiB,1x24GiB", cpu=70), "a", 60)
    node = with_hot(node, "old", 20, [1])
    decision = deploy([node], want("a", 60), want("b", 20))
    assert evicted_models(decision) == ["old"]
    assert not warm(decision.cluster, "old")
    roomy = with_hot(with_warm(a_node("1x80GiB,1x24GiB", cpu=80), "a", 60), "old", 20, [1])
    assert warm(deploy([roomy], want("a", 60), want("b", 20)).cluster, "old")


# Dedication


def test_dedicated_demand_dedicates_requested_number_of_replicas() -> None:
    node = with_hot(a_node("3x24GiB"), "a", 20, [0], age=100, replica="1")
    node = with_hot(node, "a", 20, [1], age=300, replica="2")
    node = with_hot(node, "a", 20, [2], age=200, replica="3")
    decision = deploy([node], want("a", 20, 2, dedicated=True))
    dedicated = {d.replica_id for d in decision.cluster.hot("a") if d.dedicated}
    assert dedicated == {"a-2", "a-3"}
    assert {p.replica.replica_id for p in decision.placed if p.replica.dedicated} == dedicated


def test_dedicated_replica_stays_dedicated_after_ordinary_demand() -> None:
    cluster = Cluster.of(with_hot(a_node("1x24GiB"), "a", 20, [0], dedicated=True))
    assert deploy(cluster, want("a", 20)).cluster is cluster


def test_dedication_can_be_revoked() -> None:
    cluster = Cluster.of(with_hot(a_node("1x24GiB"), "a", 20, [0], dedicated=True))
    freed = cluster.with_dedicated("a", 0)
    assert not freed.hot("a")[0].dedicated
    assert freed.with_dedicated("a", 1) == cluster
    assert cluster.with_dedicated("a", 1) is cluster


def test_dedicated_demand_evicts_young_but_not_dedicated_replicas() -> None:
    node = with_hot(
        with_hot(a_node("2x24GiB"), "y", 20, [0], age=YOUNG), "d", 20, [1], dedicated=True
    )
    assert evicted_models(deploy([node], want("new", 20, dedicated=True))) == ["y"]
    assert deploy([node], want("new", 40, dedicated=True)).refused


# Eviction by an operator


def a_cluster() -> Cluster:
    node = with_hot(a_node("4x24GiB"), "a", 20, [0], dedicated=True, replica="1")
    node = with_hot(node, "a", 20, [1], age=YOUNG, replica="2")
    return Cluster.of(with_warm(node, "a", 20, replica="3"), a_node(node_id="n2"))


def test_operator_evicts_protected_replicas_and_other_nodes_are_unchanged() -> None:
    cluster = a_cluster()
    decision = cluster.evict(["a"])
    assert levels(decision.cluster) == {"a-1": "WARM", "a-2": "WARM", "a-3": "WARM"}
    assert sorted(decision.evictions) == [("a", "a-1"), ("a", "a-2")]
    assert decision.cluster.nodes["n2"] is cluster.nodes["n2"]
    assert decision.cluster.evict(["a"]).cluster is decision.cluster
    assert not any(d.dedicated for d in decision.cluster.replicas())


def test_operator_evicts_single_replicas() -> None:
    decision = a_cluster().evict(replica_keys=[("a", "a-2"), ("a", "a-3"), ("a", "none")])
    assert levels(decision.cluster) == {"a-1": "HOT", "a-2": "WARM", "a-3": "WARM"}
    assert decision.evictions == (("a", "a-2"),)


def test_eviction_to_cold_leaves_no_replica() -> None:
    decision = a_cluster().evict(["a"], to=COLD)
    assert levels(decision.cluster) == {}
    assert len(decision.evictions) == 2
    node = decision.cluster.nodes["n1"]
    assert node.resources == node.resources.emptied()
    with pytest.raises(ValueError, match="HOT"):
        a_cluster().evict(["a"], to=HOT)


def test_failed_replica_is_removed() -> None:
    cluster = a_cluster().without([("a", "a-1"), ("b", "none")])
    assert levels(cluster) == {"a-2": "HOT", "a-3": "WARM"}
    assert cluster.find(("a", "a-1")) is None
    assert cluster.find(("a", "a-3")) is not None
    assert cluster.without([("a", "a-1")]) is cluster


# Nodes that come and go


def test_new_nodes_are_added_and_replicas_of_removed_nodes_are_lost() -> None:
    cluster = a_cluster()
    again = a_node("4x24GiB"), a_node(node_id="n2")
    assert cluster.with_nodes(again).cluster is cluster
    grown = cluster.with_nodes([*again, a_node("1x24GiB", node_id="n3")])
    assert (grown.removed, grown.lost, "n3" in grown.cluster.nodes) == ((), (), True)
    shrunk = grown.cluster.with_nodes(again[1:])
    assert (shrunk.removed, [*shrunk.cluster.nodes]) == (("n1", "n3"), ["n2"])
    assert sorted(shrunk.lost) == [("a", "a-1"), ("a", "a-2"), ("a", "a-3")]
    assert list(shrunk.cluster.nodes) == ["n2"]


def test_node_with_changed_memory_is_new_node() -> None:
    changed = a_cluster().with_nodes([a_node("2x24GiB"), a_node(node_id="n2")])
    assert (changed.removed, {*changed.cluster.nodes}) == (("n1",), {"n1", "n2"})
    assert len(changed.lost) == 3
    assert not list(changed.cluster.replicas())


def test_node_can_be_renamed() -> None:
    cluster = a_cluster()
    node = Node("n1", "renamed", cluster.nodes["n1"].resources.emptied())
    renamed = cluster.with_nodes([node, a_node(node_id="n2")])
    assert (renamed.removed, renamed.lost) == ((), ())
    assert renamed.cluster.nodes["n1"].name == "renamed"
    assert levels(renamed.cluster) == levels(cluster)


def test_node_subtracts_memory_of_its_replicas() -> None:
    node = with_cpu(with_warm(with_hot(a_node("1x24GiB"), "a", 4, [0], share=True), "b", 2), "c", 3)
    assert node.resources.free_gpu_bytes == (20 * GiB,)
    assert (node.resources.cpu_bytes, node.resources.free_cpu_bytes) == (100 * GiB, 95 * GiB)
    assert [*node.hot["a"], *node.hot["c"], *node.warm["b"]] == ["a-1", "c-1", "b-1"]
    assert node.hot["a"]["a-1"].gpu_mem_bytes_by_id == {0: 4 * GiB}


def test_replica_has_name_of_its_actor() -> None:
    cluster = Cluster.of(Node("n", "n", Resources.of((24 * GiB,), 0)))
    (placement,) = deploy(cluster, want("a", 1)).placed
    replica_id = placement.replica.replica_id
    assert placement.replica.name == f"ModelActor:a:{replica_id}"
