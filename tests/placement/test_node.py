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


def test_new_replica_can_evict_replica_of_same_model() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0])
    assert evaluated(node, want("a", 20), "a-2").level is CandidateLevel.FULL


def test_warm_replica_is_cached_candidate_with_or_without_evictions() -> None:
    node = with_warm(a_node("1x24GiB"), "a", 20)
    assert evaluated(node, want("a", 20), "a-1").level is CandidateLevel.CACHED_AND_FREE
    full = with_hot(node, "b", 20, [0])
    assert evaluated(full, want("a", 20), "a-1").level is CandidateLevel.CACHED_AND_FULL
    kept = with_hot(node, "b", 20, [0], dedicated=True)
    assert evaluated(kept, want("a", 20), "a-1").level is CandidateLevel.CANT_ACCOMMODATE


def test_new_replica_is_free_full_or_unplaceable_candidate() -> None:
    node = a_node("1x24GiB")
    assert evaluated(node, want("a", 20)).level is CandidateLevel.FREE
    assert evaluated(with_hot(node, "b", 20, [0]), want("a", 20)).level is CandidateLevel.FULL
    assert evaluated(node, want("a", 25)).level is CandidateLevel.CANT_ACCOMMODATE


def test_warm_replica_returns_with_its_own_size() -> None:
    node = with_warm(a_node("1x24GiB,1x80GiB"), "a", 40)
    candidate = evaluated(node, want("a", 20), "a-1")
    assert candidate.gpu_mem_bytes_by_id == {1: 80 * GiB}
    after = node.with_deployed(want("a", 20), "a-1", candidate, NOW)
    assert after.hot["a"]["a-1"].size_bytes == 40 * GiB
    assert after.resources.free_cpu_bytes == 100 * GiB


# Choice of evictions


def test_replica_on_fewest_gpus_is_evicted_first() -> None:
    node = with_hot(a_node("3x24GiB"), "two", 30, [0, 1])
    node = with_hot(node, "one", 20, [2])
    assert evicted(node, want("new", 20)) == ["one"]
    assert evicted(node, want("new", 30)) == ["two"]
    assert sorted(evicted(node, want("new", 60))) == ["one", "two"]


def test_eviction_prefers_smallest_then_oldest_replica() -> None:
    node = with_hot(a_node("3x24GiB"), "large", 20, [0])
    node = with_hot(node, "small", 10, [1])
    node = with_hot(node, "older", 10, [2], age=OLD + 1)
    assert evicted(node, want("new", 20)) == ["older"]


def test_dedicated_replicas_are_never_evicted() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], dedicated=True)
    assert evicted(node, want("new", 20)) == []
    assert evaluated(node, want("new", 20, dedicated=True)).level is (
        CandidateLevel.CANT_ACCOMMODATE
    )


def test_young_replicas_are_evicted_only_for_dedicated_demand() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=YOUNG)
    assert evaluated(node, want("new", 20)).level is CandidateLevel.CANT_ACCOMMODATE
    assert evicted(node, want("new", 20, dedicated=True)) == ["a"]


def test_replica_is_young_until_minimum_deployment_time_has_passed() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=3599.9)
    assert evaluated(node, want("new", 20)).level is CandidateLevel.CANT_ACCOMMODATE
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=3600)
    assert evaluated(node, want("new", 20)).level is CandidateLevel.FULL
    impatient = PlacementRules(minimum_deployment_time_s=0)
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=0)
    assert node.evaluate(want("new", 20), "new", NOW, impatient).level is CandidateLevel.FULL


def test_replica_of_model_demanded_together_is_not_evicted() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0])
    candidate = evaluated(node, want("new", 20), together=frozenset({"a", "new"}))
    assert candidate.level is CandidateLevel.CANT_ACCOMMODATE


def test_eviction_spares_replicas_that_do_not_help() -> None:
    # "tiny" and "small" would be evicted first, but only the eviction of "large" frees a whole GPU.
    node = with_hot(a_node("2x24GiB"), "tiny", 1, [0], share=True)
    node = with_hot(node, "small", 2, [0], share=True)
    node = with_hot(node, "kept", 2, [0], share=True, dedicated=True)
    node = with_hot(node, "large", 20, [1])
    assert evicted(node, want("new", 20)) == ["large"]


def test_gpu_share_evicts_only_as_much_as_it_needs() -> None:
    node = a_node("1x100GiB")
    for name, size in (("a", 25), ("b", 26), ("c", 27)):
        node = with_hot(node, name, size, [0], share=True)
    candidate = evaluated(node, want("new", 20))
    assert [d.model_key for d in candidate.evictions] == ["a"]
    assert candidate.gpu_mem_bytes_by_id == {0: 20 * GiB}


def test_cpu_replica_is_not_evicted_for_gpu_replica() -> None:
    node = with_cpu(with_hot(a_node("1x24GiB"), "a", 20, [0]), "on-cpu", 1)
    assert evicted(node, want("new", 20)) == ["a"]


# Evicted replicas


def deployed(node: Node, demand: Demand, replica_id: str = "new") -> Node:
    return node.with_deployed(demand, replica_id, evaluated(node, demand, replica_id), NOW)


def test_evicted_replica_is_cached_if_cpu_memory_suffices() -> None:
    node = deployed(with_hot(a_node("1x24GiB", cpu=20), "a", 20, [0]), want("new", 20))
    warm = node.warm["a"]["a-1"]
    assert (warm.level, warm.gpu_mem_bytes_by_id, warm.gpu_memory_fraction) == (WARM, {}, None)
    assert node.resources.free_cpu_bytes == 0
    assert set(node.hot) == {"new"}


def test_evicted_replica_is_deleted_if_cpu_memory_is_short() -> None:
    node = deployed(with_hot(a_node("1x24GiB", cpu=19), "a", 20, [0]), want("new", 20))
    assert not node.warm
    assert node.resources.free_cpu_bytes == 19 * GiB


def test_fewest_and_smallest_warm_replicas_are_dropped_for_evicted_one() -> None:
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


def test_no_warm_replica_is_dropped_for_evicted_one_that_cannot_be_cached() -> None:
    node = with_hot(a_node("1x24GiB", cpu=18), "a", 20, [0])
    node = deployed(with_warm(node, "w", 10), want("new", 20))
    assert set(node.warm) == {"w"}


def test_larger_of_two_evicted_replicas_is_cached() -> None:
    node = with_hot(a_node("2x24GiB", cpu=25), "large", 20, [0])
    node = deployed(with_hot(node, "small", 10, [1]), want("new", 40))
    assert set(node.warm) == {"large"}


def test_returning_replica_frees_cpu_memory_only_after_others_left_gpus() -> None:
    node = with_warm(with_hot(a_node("1x24GiB", cpu=40), "a", 20, [0]), "b", 20)
    after = deployed(node, want("b", 20), "b-1")
    assert set(after.warm) == {"a"}
    assert after.resources.free_cpu_bytes == 20 * GiB
    # With less memory, "a" would wait for the CPU memory of "b", and "b" for the GPU of "a".
    node = with_warm(with_hot(a_node("1x24GiB", cpu=39), "a", 20, [0]), "b", 19.5)
    after = deployed(node, want("b", 20), "b-1")
    assert not after.warm
    assert set(after.hot) == {"b"}


# On the CPU


def test_cpu_replica_takes_cpu_memory_of_node() -> None:
    demand = want("new", 60, device=Device.CPU)
    candidate = evaluated(a_node(cpu=100), demand)
    assert (candidate.level, candidate.on_cpu) == (CandidateLevel.FREE, True)
    node = deployed(a_node(cpu=100), demand)
    assert node.resources.free_cpu_bytes == 40 * GiB
    assert node.hot["new"]["new"].on_cpu


def test_warm_replicas_are_dropped_before_hot_ones_for_cpu_replica() -> None:
    node = with_warm(with_cpu(a_node(cpu=100), "hot", 50), "warm", 30)
    after = deployed(node, want("new", 40, device=Device.CPU))
    assert (set(after.hot), set(after.warm)) == ({"hot", "new"}, set())
    # If the warm replica alone does not suffice, and the hot one alone does, the warm one stays.
    after = deployed(node, want("new", 60, device=Device.CPU))
    assert (set(after.hot), set(after.warm)) == ({"new"}, {"warm"})


def test_cpu_replica_is_deleted_not_cached_on_eviction() -> None:
    node = with_cpu(a_node(cpu=100), "a", 60)
    candidate = evaluated(node, want("new", 60, device=Device.CPU))
    assert candidate.level is CandidateLevel.FULL
    after = deployed(node, want("new", 60, device=Device.CPU))
    assert (set(after.hot), set(after.warm)) == ({"new"}, set())


def test_warm_and_hot_cpu_replicas_take_same_memory() -> None:
    node = with_cpu(a_node(cpu=100), "a", 60)
    warm = node.with_evicted([("a", "a-1")])
    assert warm.resources == node.resources
    assert warm.warm["a"]["a-1"].on_cpu
    demand = want("a", 60, device=Device.CPU)
    assert evaluated(warm, demand, "a-1").level is CandidateLevel.CACHED_AND_FREE
    back = deployed(warm, demand, "a-1")
    assert back.resources == node.resources
    assert back.hot["a"]["a-1"].deployed == NOW


def test_warm_replica_returns_to_its_own_kind_of_device() -> None:
    node = with_cpu(a_node("1x24GiB"), "a", 10, level=WARM)
    assert evaluated(node, want("a", 10), "a-1").level is CandidateLevel.CANT_ACCOMMODATE
    auto = want("a", 10, device=Device.AUTO)
    assert evaluated(node, auto, "a-1").level is CandidateLevel.CACHED_AND_FREE


def test_auto_device_prefers_gpu_and_falls_back_to_cpu() -> None:
    auto = want("new", 20, device=Device.AUTO)
    assert not evaluated(a_node("1x24GiB"), auto).on_cpu
    displacing = evaluated(with_hot(a_node("1x24GiB"), "a", 20, [0]), auto)
    assert (displacing.on_cpu, displacing.level) == (False, CandidateLevel.FULL)
    assert evaluated(with_hot(a_node("1x24GiB"), "a", 20, [0], age=YOUNG), auto).on_cpu
    assert evaluated(a_node("1x12GiB"), auto).on_cpu
    assert evaluated(a_node(), auto).on_cpu


def test_node_is_immutable() -> None:
    node = with_warm(with_hot(a_node("2x24GiB"), "a", 20, [0]), "b", 10)
    before = copy.deepcopy(node)
    deployed(node, want("new", 40))
    node.with_evicted([("a", "a-1")])
    node.without([("a", "a-1"), ("b", "b-1")])
    assert node == before


def test_room_follows_given_placement_rules() -> None:
    node = a_node("1x30GiB")
    assert node.largest_fit(False, DEFAULT_RULES) == 30 * GiB
    shared = with_hot(node, "a", 5, [0], share=True)
    assert shared.largest_fit(False, DEFAULT_RULES) == 10 * GiB
    assert shared.largest_fit(False, PlacementRules(gpu_fraction_factor=2)) == 15 * GiB
