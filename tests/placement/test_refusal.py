"""Reasons of a refused placement, as data and as a sentence."""

from __future__ import annotations

import pytest

from ndif.placement.demand import Demand, Device
from ndif.placement.node import Node
from ndif.placement.refusal import Blocker, BlockReason, PlacementRefusal, explain_refusal
from tests.placement.worlds import GiB, a_node, deploy, want, with_cpu, with_hot, with_warm

GB = 10**9


def refused(nodes: list[Node], *demand: Demand) -> PlacementRefusal:
    (refusal,) = deploy(nodes, *demand).refused
    return refusal


def holds(refusal: PlacementRefusal) -> dict[str, BlockReason]:
    return {blocker.model_key: blocker.reason for blocker in refusal.blockers}


def test_refusal_names_young_replica_and_its_remaining_time() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=3600 - 12 * 60)
    refusal = refused([node], want("new", 20))
    assert holds(refusal) == {"a": BlockReason.YOUNG}
    assert refusal.retry_after_s == pytest.approx(12 * 60)
    assert explain_refusal(refusal) == (
        "'new' needs 20GiB on GPUs; name-n1 has no room; 'a' is protected for another 12m. "
        "Try again in 12m."
    )
    assert deploy([node], want("new", 20), now=1_000_000 + 12 * 60).placed


def test_refusal_names_node_that_is_ready_first() -> None:
    later = with_hot(a_node("1x24GiB", node_id="n1"), "a", 20, [0], age=100)
    never = with_hot(a_node("1x24GiB", node_id="n2"), "b", 20, [0], age=3000, dedicated=True)
    sooner = with_hot(a_node("2x24GiB", node_id="n3"), "c", 20, [0], age=3000)
    sooner = with_hot(sooner, "d", 20, [1], age=1000)
    refusal = refused([later, never, sooner], want("new", 20))
    assert refusal.node_name == "name-n3"
    assert holds(refusal) == {"c": BlockReason.YOUNG}
    assert refusal.retry_after_s == pytest.approx(600)
    both = refused([later, never, sooner], want("new", 40))
    assert holds(both) == {"c": BlockReason.YOUNG, "d": BlockReason.YOUNG}
    assert both.retry_after_s == pytest.approx(2600)


def test_refusal_does_not_blame_evictable_replica() -> None:
    node = with_hot(with_hot(a_node("2x24GiB"), "old", 20, [0]), "young", 20, [1], age=0)
    refusal = refused([node], want("new", 40))
    assert holds(refusal) == {"old": BlockReason.NOTHING, "young": BlockReason.YOUNG}
    assert "'old'" not in explain_refusal(refusal)


def test_refusal_names_dedicated_replica_and_no_time() -> None:
    node = with_hot(a_node("2x24GiB"), "d", 20, [0], dedicated=True)
    node = with_hot(node, "y", 20, [1], age=0)
    refusal = refused([node], want("new", 40))
    assert holds(refusal) == {"d": BlockReason.DEDICATED, "y": BlockReason.YOUNG}
    assert refusal.retry_after_s is None
    assert explain_refusal(refusal) == (
        "'new' needs 40GiB on GPUs; name-n1 has no room; 'd' (dedicated) would have to be evicted; "
        "'y' is protected for another 1h."
    )


def test_refusal_omits_dedicated_replica_that_does_not_block() -> None:
    node = with_hot(a_node("2x24GiB"), "d", 20, [0], dedicated=True)
    node = with_hot(node, "y", 20, [1], age=0)
    assert holds(refused([node], want("new", 20))) == {"y": BlockReason.YOUNG}


def test_refusal_names_model_demanded_together() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0])
    refusal = refused([node], want("new", 20), want("a", 20))
    assert holds(refusal) == {"a": BlockReason.TOGETHER}
    assert "'a' (part of the same request) would have to be evicted" in explain_refusal(refusal)
    assert refusal.retry_after_s is None


def test_refusal_of_too_large_model_names_largest_node() -> None:
    nodes = [a_node("1x24GiB"), a_node("2x24GiB", node_id="n2"), a_node(node_id="n3")]
    refusal = refused(nodes, want("new", 100))
    assert (refusal.blockers, refusal.capacity_bytes) == ((), 48 * GiB)
    assert explain_refusal(refusal) == (
        "'new' needs 100GiB on GPUs; the largest node, name-n2, has 48GiB."
    )


def test_refusal_of_cpu_model_states_cpu_memory() -> None:
    node = with_warm(with_cpu(a_node(cpu=100), "a", 60, age=0), "w", 20)
    refusal = refused([node], want("new", 50, device=Device.CPU))
    assert refusal.on_cpu
    assert holds(refusal) == {"a": BlockReason.YOUNG}
    assert explain_refusal(refusal) == (
        "'new' needs 50GiB of CPU memory; name-n1 has room for 20GiB; "
        "'a' is protected for another 1h. Try again in 1h."
    )


def test_refusal_reports_missing_gpus_or_cpu_memory() -> None:
    assert explain_refusal(refused([], want("new", 1))).endswith(
        "; no node of this server has GPUs."
    )
    assert explain_refusal(refused([a_node()], want("new", 1))).endswith(
        "no node of this server has GPUs."
    )
    on_cpu = refused([a_node("1x24GiB", cpu=0)], want("new", 1, device=Device.CPU))
    assert explain_refusal(on_cpu).endswith("no node of this server has CPU memory.")


def test_refusal_of_auto_model_describes_nearest_device() -> None:
    node = with_hot(a_node("1x24GiB", cpu=30), "d", 20, [0], dedicated=True)
    node = with_cpu(node, "y", 20, age=0)
    refusal = refused([node], want("new", 20, device=Device.AUTO))
    assert (refusal.on_cpu, holds(refusal)) == (True, {"y": BlockReason.YOUNG})


def test_refusal_uses_repo_ids_of_models() -> None:
    def key(name: str, revision: str | None = None) -> str:
        text = "null" if revision is None else f'"{revision}"'
        return f'nnsight.LanguageModel:{{"repo_id": "{name}", "revision": {text}}}@0.8'

    node = a_node("6x24GiB")
    for index in range(5):
        node = with_hot(node, key(f"org/m{index}"), 20, [index], age=100)
    node = with_hot(node, key("org/m4", "v2"), 20, [5], age=3300)
    refusal = refused([node], want(key("org/new"), 140, 2))
    assert explain_refusal(refusal) == (
        "'org/new' needs 140GiB on GPUs for each of 2 more replicas; name-n1 has no room; "
        "'org/m4' at revision 'v2', 'org/m0', 'org/m1', 'org/m2' and 2 others "
        "are protected for another 59m. Try again in 59m."
    )


def test_blocker_contains_remaining_protection_time() -> None:
    node = with_hot(a_node("1x24GiB"), "a", 20, [0], age=3000)
    refusal = refused([node], want("new", 20))
    assert refusal.blockers == (Blocker("a", "a-1", BlockReason.YOUNG, 600),)
    assert refusal.size_bytes == 20 * GiB
