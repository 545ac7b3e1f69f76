"""Packing: the choice of GPUs for a replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ndif.placement.demand import DEFAULT_RULES
from ndif.placement.node import Node
from ndif.placement.packing import assign
from tests.placement.worlds import GiB, a_node, with_hot


def placed(node: Node, size: float) -> tuple[dict[int, float], float | None] | None:
    """Return the GiB by GPU, and the share."""
    assignment = assign(node.resources, int(size * GiB), DEFAULT_RULES)
    if assignment is None:
        return None
    return {
        i: held / GiB for i, held in assignment.gpu_mem_bytes_by_id.items()
    }, assignment.gpu_memory_fraction


# Alone


def test_model_of_a_third_of_gpu_takes_share() -> None:
    assert placed(a_node("1x24GiB"), 8) == ({0: 8}, pytest.approx(1 / 3))


def test_model_of_more_than_a_third_takes_whole_gpu() -> None:
    assert placed(a_node("1x24GiB"), 8.1) == ({0: 24}, None)
    assert placed(a_node("1x24GiB"), 24) == ({0: 24}, None)


def test_large_model_spans_fewest_gpus() -> None:
    assert placed(a_node("4x24GiB"), 24.1) == ({0: 24, 1: 24}, None)
    assert placed(a_node("4x24GiB"), 96) == ({0: 24, 1: 24, 2: 24, 3: 24}, None)
    assert placed(a_node("4x24GiB"), 96.1) is None


def test_model_takes_smallest_gpu_that_holds_it() -> None:
    assert placed(a_node("1x80GiB,1x24GiB,1x48GiB"), 20) == ({1: 24}, None)
    assert placed(a_node("1x80GiB,1x24GiB,1x48GiB"), 40) == ({2: 48}, None)
    assert placed(a_node("1x80GiB,1x24GiB,1x48GiB"), 50) == ({0: 80}, None)


def test_model_spans_few_large_gpus_rather_than_many_small_ones() -> None:
    assert placed(a_node("3x24GiB,2x80GiB"), 100) == ({0: 24, 4: 80}, None)
    assert placed(a_node("3x24GiB,2x80GiB"), 150) == ({3: 80, 4: 80}, None)
    assert placed(a_node("3x24GiB,2x80GiB"), 170) == ({0: 24, 3: 80, 4: 80}, None)


def test_node_without_gpus_has_no_room() -> None:
    assert placed(a_node(), 0.1) is None


# With CUDA contexts


def with_contexts(gpus: str, context: float) -> Node:
    node = a_node(gpus)
    return replace(node, resources=replace(node.resources, context_bytes=int(context * GiB)))


def test_cuda_contexts_add_to_model_size() -> None:
    assert placed(with_contexts("1x24GiB", 2), 6) == ({0: 8}, pytest.approx(1 / 3))
    assert placed(with_contexts("1x24GiB", 2), 6.1) == ({0: 24}, None)
    assert placed(with_contexts("1x24GiB", 2), 22) == ({0: 24}, None)
    assert placed(with_contexts("1x24GiB", 2), 22.1) is None


def test_model_that_spans_gpus_has_contexts_on_each() -> None:
    assert placed(with_contexts("2x24GiB", 2), 44) == ({0: 24, 1: 24}, None)
    assert placed(with_contexts("2x24GiB", 2), 44.1) is None


def test_contexts_limit_number_of_small_models() -> None:
    counted = {}
    for context in (0.0, 2.0):
        node = with_contexts("1x24GiB", context)
        while (place := placed(node, 0.5)) is not None:
            node = with_hot(
                node, "small", place[0][0], [0], share=True, replica=str(node.resources)
            )
        counted[context] = len(list(node.replicas()))
    # Four fifths of the GPU, and none once less than three tenths is free.
    assert counted == {0.0: 34, 2.0: 7}


def test_gpu_smaller_than_contexts_holds_no_model() -> None:
    assert placed(with_contexts("1x2GiB,1x4GiB", 2.5), 1) == ({1: 4}, None)
    assert placed(with_contexts("2x2GiB", 2.5), 0.1) is None


def test_withdrawn_gpu_takes_no_new_replica() -> None:
    node = a_node("2x24GiB")
    node = replace(node, resources=replace(node.resources, withdrawn=frozenset([0])))
    assert placed(node, 8) == ({1: 8}, pytest.approx(1 / 3))
    assert placed(node, 24.1) is None
    # Its current replica stays, and no other joins.
    beside = with_hot(node, "old", 4, [0], share=True)
    assert placed(with_hot(beside, "other", 24, [1]), 1) is None


# Beside other replicas


def test_small_model_joins_shared_gpu_before_empty_one() -> None:
    node = with_hot(a_node("3x24GiB"), "a", 2, [1], share=True)
    assert placed(node, 2) == ({1: 2}, pytest.approx(2 / 24))


def test_small_model_joins_fullest_shared_gpu() -> None:
    node = with_hot(a_node("2x24GiB"), "a", 2, [0], share=True)
    node = with_hot(node, "b", 6, [1], share=True)
    assert placed(node, 5) == ({1: 5}, pytest.approx(5 / 24))


def test_shares_take_at_most_four_fifths_of_gpu() -> None:
    node = with_hot(a_node("1x100GiB"), "a", 30, [0], share=True)
    node = with_hot(node, "b", 30, [0], share=True)
    assert placed(node, 20) == ({0: 20}, 0.2)
    assert placed(node, 20.1) is None


def test_gpu_with_less_than_three_tenths_free_takes_no_share() -> None:
    node = with_hot(a_node("1x100GiB"), "a", 30, [0], share=True)
    node = with_hot(node, "b", 30, [0], share=True)
    assert placed(with_hot(node, "c", 10, [0], share=True), 1) is not None
    assert placed(with_hot(node, "c", 10.5, [0], share=True), 1) is None


def test_exclusive_gpu_takes_no_share() -> None:
    node = with_hot(a_node("2x24GiB"), "a", 9, [0])
    assert placed(node, 1) == ({1: 1}, pytest.approx(1 / 24))
    assert placed(with_hot(node, "b", 9, [1]), 1) is None


def test_large_model_does_not_take_shared_gpu() -> None:
    node = with_hot(a_node("2x24GiB"), "a", 1, [0], share=True)
    assert placed(node, 20) == ({1: 24}, None)
    assert placed(node, 30) is None


def test_model_spans_small_gpus_if_large_one_is_taken() -> None:
    node = with_hot(a_node("1x80GiB,3x24GiB"), "a", 70, [0])
    assert placed(node, 60) == ({1: 24, 2: 24, 3: 24}, None)
