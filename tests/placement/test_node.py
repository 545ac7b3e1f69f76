"""A node's candidates for a replica, and the replicas that it evicts."""

from __future__ import annotations

import copy

from ndif.placement.demand import DEFAULT_RULES, Demand, Device, PlacementRules
from ndif.placement.node import Candidate, Node
from ndif.placement.replica import CandidateLevel
from tests.placement.worlds import (
    NOW,
    OLD,
    WARM,
    YOUNG,
    GiB,
    a_node,
    want,
    with_cpu,
    with_hot,
    with_warm,
)


def evaluated(
    node: Node, demand: Demand, replica_id: str = "new", together: frozenset[str] = frozenset()
) -> Candidate:
    return node.evaluate(demand, replica_id, NOW, DEFAULT_RULES, together)


def evicted(node: Node, demand: Demand) -> list[str]:
    return [replica.model_key for replica in evaluated(node, demand).evictions]


# Levels


def test_a_further_replica_of_a_model_may_take_the_place_of_one() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0])
    assert evaluated(node, want("a", 20), "a-2").level is CandidateLevel.FULL


def test_a_replica_that_is_warm_is_cached_and_returns_with_or_without_evictions() -> None:
    node = with_warm(a_node("1x24GiB"), "a", 20)
    assert evaluated(node, want("a", 20), "a-1").level is CandidateLevel.CACHED_AND_FREE
    full = with_hot(node, "b", 20, [0])
    assert evaluated(full, want("a", 20), "a-1").level is CandidateLevel.CACHED_AND_FULL
    kept = with_hot(node, "b", 20, [0], dedicated=True)
    assert evaluated(kept, want("a", 20), "a-1").level is CandidateLevel.CANT_ACCOMMODATE


def test_a_new_replica_finds_a_node_free_or_full_or_too_small() -> None:
    node = a_node("1x24GiB")
    assert evaluated(node, want("a", 20)).level is CandidateLevel.FREE
    assert evaluated(with_hot(node, "b", 20, [0]), want("a", 20)).level is CandidateLevel.FULL
    assert evaluated(node, want("a", 25)).level is CandidateLevel.CANT_ACCOMMODATE


def test_a_warm_replica_returns_with_the_size_that_it_has() -> None:
    node = with_warm(a_node("1x24GiB,1x80GiB"), "a", 40)
    candidate = evaluated(node, want("a", 20), "a-1")
    assert candidate.gpu_mem_bytes_by_id == {1: 80 * GiB}
    after = node.with_deployed(want("a", 20), "a-1", candidate, NOW)
    assert after.hot["a"]["a-1"].size_bytes == 40 * GiB
    assert after.resources.free_cpu_bytes == 100 * GiB


# Who has to go


def test_whoever_is_on_the_fewest_gpus_goes_first() -> None:
    node = with_hot(a_node("3x24GiB"), "two", 30, [0, 1])
    node = with_hot(node, "one", 20, [2])
    assert evicted(node, want("new", 20)) == ["one"]
    assert evicted(node, want("new", 30)) == ["two"]
    assert sorted(evicted(node, want("new", 60))) == ["one", "two"]


def test_of_equals_the_smallest_goes_first_and_then_the_oldest() -> None:
    node = with_hot(a_node("3x24GiB"), "large", 20, [0])
    node = with_hot(node, "small", 10, [1])
    node = with_hot(node, "older", 10, [2], age=OLD + 1)
    assert evicted(node, want("new", 20)) == ["older"]


def test_dedicated_replicas_never_go() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], dedicated=True)
    assert evicted(node, want("new", 20)) == []
    assert evaluated(node, want("new", 20, dedicated=True)).level is (
        CandidateLevel.CANT_ACCOMMODATE
    )


def test_young_replicas_go_only_for_dedicated_ones() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=YOUNG)
    assert evaluated(node, want("new", 20)).level is CandidateLevel.CANT_ACCOMMODATE
    assert evicted(node, want("new", 20, dedicated=True)) == ["a"]


def test_a_replica_is_young_until_the_minimum_deployment_time_has_passed() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=3599.9)
    assert evaluated(node, want("new", 20)).level is CandidateLevel.CANT_ACCOMMODATE
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=3600)
    assert evaluated(node, want("new", 20)).level is CandidateLevel.FULL
    impatient = PlacementRules(minimum_deployment_time_s=0)
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=0)
    assert node.evaluate(want("new", 20), "new", NOW, impatient).level is CandidateLevel.FULL


def test_nobody_goes_of_what_is_asked_for_together() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0])
    candidate = evaluated(node, want("new", 20), together=frozenset({"a", "new"}))
    assert candidate.level is CandidateLevel.CANT_ACCOMMODATE


def test_nobody_goes_who_is_not_in_the_way() -> None:
    # By the order "tiny" and "small" would go first, but only "large" makes a whole GPU free.
    node = with_hot(a_node("2x24GiB"), "tiny", 1, [0], share=True)
    node = with_hot(node, "small", 2, [0], share=True)
    node = with_hot(node, "kept", 2, [0], share=True, dedicated=True)
    node = with_hot(node, "large", 20, [1])
    assert evicted(node, want("new", 20)) == ["large"]


def test_a_share_displaces_only_what_it_needs_of_one_gpu() -> None:
    node = a_node("1x100GiB")
    for name, size in (("a", 25), ("b", 26), ("c", 27)):
        node = with_hot(node, name, size, [0], share=True)
    candidate = evaluated(node, want("new", 20))
    assert [d.model_key for d in candidate.evictions] == ["a"]
    assert candidate.gpu_mem_bytes_by_id == {0: 20 * GiB}


def test_a_replica_on_the_cpu_is_not_in_the_way_of_one_on_gpus() -> None:
    node = with_cpu(with_hot(a_node("1x24GiB"), "a", 20, [0]), "on-cpu", 1)
    assert evicted(node, want("new", 20)) == ["a"]


# What becomes of those that go


def deployed(node: Node, demand: Demand, replica_id: str = "new") -> Node:
    return node.with_deployed(demand, replica_id, evaluated(node, demand, replica_id), NOW)


def test_who_goes_becomes_warm_where_memory_suffices() -> None:
    node = deployed(with_hot(a_node("1x24GiB", cpu=20), "a", 20, [0]), want("new", 20))
    warm = node.warm["a"]["a-1"]
    assert (warm.level, warm.gpu_mem_bytes_by_id, warm.gpu_memory_fraction) == (WARM, {}, None)
    assert node.resources.free_cpu_bytes == 0
    assert set(node.hot) == {"new"}


def test_who_goes_is_deleted_where_it_does_not() -> None:
    node = deployed(with_hot(a_node("1x24GiB", cpu=19), "a", 20, [0]), want("new", 20))
    assert not node.warm
    assert node.resources.free_cpu_bytes == 19 * GiB


def test_the_smallest_warm_ones_are_dropped_for_it_and_no_more_than_needed() -> None:
    node = with_hot(a_node("1x24GiB", cpu=40), "a", 20, [0])
    for name, size in (("w3", 3), ("w5", 5), ("w12", 12)):
        node = with_warm(node, name, size)
    assert set(deployed(with_warm(node, "w10", 10), want("new", 20)).warm) == {
        "a",
        "w3",
        "w5",
        "w12",
    }
    assert set(deployed(with_warm(node, "w20", 20), want("new", 20)).warm) == {"a", "w20"}


def test_nothing_is_dropped_for_what_cannot_become_warm_anyway() -> None:
    node = with_hot(a_node("1x24GiB", cpu=18), "a", 20, [0])
    node = deployed(with_warm(node, "w", 10), want("new", 20))
    assert set(node.warm) == {"w"}


def test_of_two_that_go_the_larger_is_kept_warm() -> None:
    node = with_hot(a_node("2x24GiB", cpu=25), "large", 20, [0])
    node = deployed(with_hot(node, "small", 10, [1]), want("new", 40))
    assert set(node.warm) == {"large"}


def test_what_returns_gives_its_memory_back_but_only_after_the_others_have_left_their_gpus() -> (
    None
):
    node = with_warm(with_hot(a_node("1x24GiB", cpu=40), "a", 20, [0]), "b", 20)
    after = deployed(node, want("b", 20), "b-1")
    assert set(after.warm) == {"a"}
    assert after.resources.free_cpu_bytes == 20 * GiB
    # With less memory "a" would have to wait for what "b" gives back, and "b" for the GPU of "a".
    node = with_warm(with_hot(a_node("1x24GiB", cpu=39), "a", 20, [0]), "b", 19.5)
    after = deployed(node, want("b", 20), "b-1")
    assert not after.warm
    assert set(after.hot) == {"b"}


# On the CPU


def test_a_replica_on_the_cpu_takes_the_nodes_memory() -> None:
    demand = want("new", 60, device=Device.CPU)
    candidate = evaluated(a_node(cpu=100), demand)
    assert (candidate.level, candidate.on_cpu) == (CandidateLevel.FREE, True)
    node = deployed(a_node(cpu=100), demand)
    assert node.resources.free_cpu_bytes == 40 * GiB
    assert node.hot["new"]["new"].on_cpu


def test_warm_replicas_make_way_for_it_before_hot_ones() -> None:
    node = with_warm(with_cpu(a_node(cpu=100), "hot", 50), "warm", 30)
    after = deployed(node, want("new", 40, device=Device.CPU))
    assert (set(after.hot), set(after.warm)) == ({"hot", "new"}, set())
    # Where the warm one alone would not do, and the hot one alone does, the warm one stays.
    after = deployed(node, want("new", 60, device=Device.CPU))
    assert (set(after.hot), set(after.warm)) == ({"new"}, {"warm"})


def test_who_goes_from_the_cpu_for_another_is_deleted_since_warm_it_would_free_nothing() -> None:
    node = with_cpu(a_node(cpu=100), "a", 60)
    candidate = evaluated(node, want("new", 60, device=Device.CPU))
    assert candidate.level is CandidateLevel.FULL
    after = deployed(node, want("new", 60, device=Device.CPU))
    assert (set(after.hot), set(after.warm)) == ({"new"}, set())


def test_on_the_cpu_warm_and_hot_take_the_same_memory() -> None:
    node = with_cpu(a_node(cpu=100), "a", 60)
    warm = node.with_evicted([("a", "a-1")])
    assert warm.resources == node.resources
    assert warm.warm["a"]["a-1"].on_cpu
    demand = want("a", 60, device=Device.CPU)
    assert evaluated(warm, demand, "a-1").level is CandidateLevel.CACHED_AND_FREE
    back = deployed(warm, demand, "a-1")
    assert back.resources == node.resources
    assert back.hot["a"]["a-1"].deployed == NOW


def test_a_warm_replica_returns_to_its_own_kind_of_device() -> None:
    node = with_cpu(a_node("1x24GiB"), "a", 10, level=WARM)
    assert evaluated(node, want("a", 10), "a-1").level is CandidateLevel.CANT_ACCOMMODATE
    auto = want("a", 10, device=Device.AUTO)
    assert evaluated(node, auto, "a-1").level is CandidateLevel.CACHED_AND_FREE


def test_auto_is_a_gpu_where_one_can_be_had_and_else_a_cpu() -> None:
    auto = want("new", 20, device=Device.AUTO)
    assert not evaluated(a_node("1x24GiB"), auto).on_cpu
    displacing = evaluated(with_hot(a_node("1x24GiB"), "a", 20, [0]), auto)
    assert (displacing.on_cpu, displacing.level) == (False, CandidateLevel.FULL)
    assert evaluated(with_hot(a_node("1x24GiB"), "a", 20, [0], age=YOUNG), auto).on_cpu
    assert evaluated(a_node("1x12GiB"), auto).on_cpu
    assert evaluated(a_node(), auto).on_cpu


def test_a_node_is_never_changed() -> None:
    node = with_warm(with_hot(a_node("2x24GiB"), "a", 20, [0]), "b", 10)
    before = copy.deepcopy(node)
    deployed(node, want("new", 40))
    node.with_evicted([("a", "a-1")])
    node.without([("a", "a-1"), ("b", "b-1")])
    assert node == before


def test_the_quick_look_follows_the_rules_it_is_asked_by() -> None:
    node = a_node("1x30GiB")
    assert node.room(False, DEFAULT_RULES) == 30 * GiB
    shared = with_hot(node, "a", 5, [0], share=True)
    assert shared.room(False, DEFAULT_RULES) == 10 * GiB
    assert shared.room(False, PlacementRules(gpu_fraction_factor=2)) == 15 * GiB
