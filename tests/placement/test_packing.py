"""On which GPUs a replica goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ndif.placement.demand import DEFAULT_RULES
from ndif.placement.node import Node
from ndif.placement.packing import assign
from tests.placement.worlds import GiB, a_node, with_hot


def placed(node: Node, size: float) -> tuple[dict[int, float], float | None] | None:
    """GiB by GPU, and the share."""
    found = assign(node.resources, int(size * GiB), DEFAULT_RULES)
    if found is None:
        return None
    return {
        i: held / GiB for i, held in found.gpu_mem_bytes_by_id.items()
    }, found.gpu_memory_fraction


# Alone


def test_a_model_that_needs_a_third_of_a_gpu_takes_its_share() -> None:
    assert placed(a_node("1x24GiB"), 8) == ({0: 8}, pytest.approx(1 / 3))


def test_a_model_that_needs_more_takes_the_whole_gpu() -> None:
    assert placed(a_node("1x24GiB"), 8.1) == ({0: 24}, None)
    assert placed(a_node("1x24GiB"), 24) == ({0: 24}, None)


def test_a_model_that_one_gpu_does_not_hold_spans_the_fewest() -> None:
    assert placed(a_node("4x24GiB"), 24.1) == ({0: 24, 1: 24}, None)
    assert placed(a_node("4x24GiB"), 96) == ({0: 24, 1: 24, 2: 24, 3: 24}, None)
    assert placed(a_node("4x24GiB"), 96.1) is None


def test_of_unequal_gpus_it_takes_the_smallest_that_holds_it() -> None:
    assert placed(a_node("1x80GiB,1x24GiB,1x48GiB"), 20) == ({1: 24}, None)
    assert placed(a_node("1x80GiB,1x24GiB,1x48GiB"), 40) == ({2: 48}, None)
    assert placed(a_node("1x80GiB,1x24GiB,1x48GiB"), 50) == ({0: 80}, None)


def test_it_spans_few_gpus_rather_than_small_ones() -> None:
    assert placed(a_node("3x24GiB,2x80GiB"), 100) == ({0: 24, 4: 80}, None)
    assert placed(a_node("3x24GiB,2x80GiB"), 150) == ({3: 80, 4: 80}, None)
    assert placed(a_node("3x24GiB,2x80GiB"), 170) == ({0: 24, 3: 80, 4: 80}, None)


def test_a_node_without_gpus_has_no_place() -> None:
    assert placed(a_node(), 0.1) is None


# Beside the contexts of its own processes


def with_contexts(gpus: str, context: float) -> Node:
    node = a_node(gpus)
    return replace(node, resources=replace(node.resources, context_bytes=int(context * GiB)))


def test_contexts_are_taken_of_each_gpu_beside_the_model() -> None:
    assert placed(with_contexts("1x24GiB", 2), 6) == ({0: 8}, pytest.approx(1 / 3))
    assert placed(with_contexts("1x24GiB", 2), 6.1) == ({0: 24}, None)
    assert placed(with_contexts("1x24GiB", 2), 22) == ({0: 24}, None)
    assert placed(with_contexts("1x24GiB", 2), 22.1) is None


def test_a_model_that_spans_gpus_has_contexts_on_each() -> None:
    assert placed(with_contexts("2x24GiB", 2), 44) == ({0: 24, 1: 24}, None)
    assert placed(with_contexts("2x24GiB", 2), 44.1) is None


def test_many_small_models_are_as_many_as_their_contexts_allow() -> None:
    counted = {}
    for context in (0.0, 2.0):
        node = with_contexts("1x24GiB", context)
        while (found := placed(node, 0.5)) is not None:
            node = with_hot(
                node, "small", found[0][0], [0], share=True, replica=str(node.resources)
            )
        counted[context] = len(list(node.replicas()))
    # Four fifths of the GPU, and none once less than three tenths is free.
    assert counted == {0.0: 34, 2.0: 7}


def test_a_gpu_that_its_contexts_fill_holds_nothing() -> None:
    assert placed(with_contexts("1x2GiB,1x4GiB", 2.5), 1) == ({1: 4}, None)
    assert placed(with_contexts("2x2GiB", 2.5), 0.1) is None


def test_a_gpu_that_was_withdrawn_takes_nobody() -> None:
    node = a_node("2x24GiB")
    node = replace(node, resources=replace(node.resources, withdrawn=frozenset([0])))
    assert placed(node, 8) == ({1: 8}, pytest.approx(1 / 3))
    assert placed(node, 24.1) is None
    # Who is on it stays, and nobody joins.
    beside = with_hot(node, "old", 4, [0], share=True)
    assert placed(with_hot(beside, "other", 24, [1]), 1) is None


# Beside others


def test_a_small_model_joins_those_that_share_before_it_opens_an_empty_gpu() -> None:
    node = with_hot(a_node("3x24GiB"), "a", 2, [1], share=True)
    assert placed(node, 2) == ({1: 2}, pytest.approx(2 / 24))


def test_it_joins_where_the_least_room_is_left() -> None:
    node = with_hot(a_node("2x24GiB"), "a", 2, [0], share=True)
    node = with_hot(node, "b", 6, [1], share=True)
    assert placed(node, 5) == ({1: 5}, pytest.approx(5 / 24))


def test_those_that_share_a_gpu_take_at_most_four_fifths_of_it() -> None:
    node = with_hot(a_node("1x100GiB"), "a", 30, [0], share=True)
    node = with_hot(node, "b", 30, [0], share=True)
    assert placed(node, 20) == ({0: 20}, 0.2)
    assert placed(node, 20.1) is None


def test_a_gpu_with_less_than_three_tenths_free_takes_nobody() -> None:
    node = with_hot(a_node("1x100GiB"), "a", 30, [0], share=True)
    node = with_hot(node, "b", 30, [0], share=True)
    assert placed(with_hot(node, "c", 10, [0], share=True), 1) is not None
    assert placed(with_hot(node, "c", 10.5, [0], share=True), 1) is None


def test_nobody_joins_a_gpu_that_is_anothers_own() -> None:
    node = with_hot(a_node("2x24GiB"), "a", 9, [0])
    assert placed(node, 1) == ({1: 1}, pytest.approx(1 / 24))
    assert placed(with_hot(node, "b", 9, [1]), 1) is None


def test_a_large_model_does_not_take_a_gpu_that_is_shared() -> None:
    node = with_hot(a_node("2x24GiB"), "a", 1, [0], share=True)
    assert placed(node, 20) == ({1: 24}, None)
    assert placed(node, 30) is None


def test_a_model_spans_smaller_gpus_when_the_large_one_is_taken() -> None:
    node = with_hot(a_node("1x80GiB,3x24GiB"), "a", 70, [0])
    assert placed(node, 60) == ({1: 24, 2: 24, 3: 24}, None)
