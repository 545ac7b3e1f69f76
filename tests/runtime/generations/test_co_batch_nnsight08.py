"""Traces of several users in one forward pass: each returns the values of a single run, or runs alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nnsight import LanguageModel

from ndif.runtime.generations import BlockError, ClientStream, Generation, create_generation
from ndif.runtime.generations.v08 import Nnsight08
from ndif.runtime.results import Result
from ndif.runtime.spec import ModelSpec
from tests.runtime.generations.blocks import (
    OTHERS,
    ROW_WISE,
    Block,
    assigns,
    edits,
    expands,
    fails,
    frees_what_it_saved,
    has_another_shape,
    longer,
    loops,
    prints,
    reads,
    saves_little,
    takes_all_but_a_row,
    waits_for_the_past,
    widens,
)
from tests.runtime.replica import Sent
from tests.tiny_models import make_gpt2, make_llama

STREAM = ClientStream(lambda _: None, lambda: b"")


@pytest.fixture(scope="module", params=[make_gpt2, make_llama])
def generation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Nnsight08:
    folder = request.param(tmp_path_factory.mktemp("model"))
    adapter = create_generation("0.8")
    adapter.load(ModelSpec(checkpoint=str(folder), generation="0.8", task="text-generation"))
    assert isinstance(adapter, Nnsight08)
    return adapter


@pytest.fixture(autouse=True)
def _forgotten(generation: Nnsight08) -> Iterator[None]:
    yield
    generation.forget()


def sent(generation: Nnsight08, block: Block) -> bytes:
    sent_block = Sent()
    block(generation.model, sent_block)
    return sent_block.payload


def alone(generation: Nnsight08, block: Block) -> dict[str, Any]:
    values = generation.run(sent(generation, block), STREAM)
    generation.forget()
    return values


def together(generation: Nnsight08, *blocks: Block) -> list[dict[str, Any] | None]:
    return generation.run_together([sent(generation, block) for block in blocks])


def close(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.allclose(left, right, atol=1e-5)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(close(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(close, left, right))
    return bool(left == pytest.approx(right, abs=1e-4))


@pytest.mark.parametrize("block", ROW_WISE)
def test_co_batched_block_returns_same_values_as_alone(generation: Nnsight08, block: Block) -> None:
    for values in together(generation, block, *ROW_WISE, block):
        assert values is not None
    first, *_, last = together(generation, block, *ROW_WISE, block)
    expected = alone(generation, block)
    assert expected
    assert close(first, expected)
    assert close(last, expected)


@pytest.mark.parametrize("block", [has_another_shape, takes_all_but_a_row, widens])
def test_shape_or_dtype_changing_assignment_runs_alone(generation: Nnsight08, block: Block) -> None:
    first, other, last = together(generation, assigns, block, assigns)
    assert other is None
    assert close(first, alone(generation, assigns))
    assert close(last, first)


def test_assigning_blocks_get_separate_pass(generation: Nnsight08) -> None:
    values = together(generation, assigns, edits, assigns, reads)
    expected = alone(generation, assigns)
    assert close(values[0], expected)
    assert close(values[2], expected)
    assert close(values[1], alone(generation, edits))
    assert close(values[3], alone(generation, reads))


def test_assigning_blocks_run_alone_if_model_writes_in_place(
    generation: Nnsight08, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = generation.model
    parts = model.transformer.h if hasattr(model._module, "transformer") else model.model.layers
    monkeypatch.setattr(generation, "_shared_passes", None)

    def write(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].add_(0)

    with parts[1]._module.register_forward_pre_hook(write):
        assert together(generation, assigns, assigns) == [None, None]
        assert None not in together(generation, reads, reads)
    monkeypatch.setattr(generation, "_shared_passes", None)


def test_saved_views_are_sent_without_base_storage(generation: Nnsight08) -> None:
    for values in together(generation, expands, expands, reads)[:2]:
        assert values is not None
        assert close(values, alone(generation, expands))
        sizes = {name: value.untyped_storage().nbytes() for name, value in values.items()}
        assert sizes["last"] <= values["last"].numel() * 4
        assert sizes["turned"] == values["turned"].numel() * 4


def test_saved_values_are_not_mixed_up_when_object_ids_are_reused(generation: Nnsight08) -> None:
    """The id of a freed saved object may be reused by another block's object."""
    for _ in range(5):
        blocks = [frees_what_it_saved, saves_little] * 4
        values = together(generation, *blocks)
        assert [list(row or ()) for row in values] == [["hidden"], ["mean"]] * 4


@pytest.mark.parametrize(
    "config", [{"num_local_experts": 8}, {"quantization_config": {"quant_method": "x"}}]
)
def test_moe_and_quantized_models_are_not_co_batched(
    generation: Nnsight08, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    monkeypatch.setattr(generation, "_shared_passes", None)
    for name, value in config.items():
        monkeypatch.setattr(generation.model._module.config, name, value, raising=False)
    assert together(generation, reads, reads) == [None, None]
    generation._shared_passes = None


@pytest.mark.parametrize("block", OTHERS)
def test_block_not_proven_row_wise_runs_alone(generation: Nnsight08, block: Block) -> None:
    first, other, last = together(generation, reads, block, edits)
    assert other is None
    assert close(first, alone(generation, reads))
    assert close(last, alone(generation, edits))


@pytest.mark.parametrize("block", [fails, waits_for_the_past, has_another_shape])
def test_failing_block_does_not_affect_co_batched_blocks(
    generation: Nnsight08, block: Block
) -> None:
    first, other, last = together(generation, loops, block, edits)
    assert other is None
    # A list of the script is filled once, although the block started twice.
    assert close(first, alone(generation, loops))
    assert close(last, alone(generation, edits))
    with pytest.raises(BlockError):
        alone(generation, block)


def test_request_of_deprecated_language_model_is_co_batched(generation: Nnsight08) -> None:
    with pytest.warns(Warning, match="LanguageModel is deprecated"):
        client = LanguageModel(generation.model.repo_id)
    sent_block = Sent()
    reads(client, sent_block)
    first, other = generation.run_together([sent_block.payload, sent(generation, reads)])
    assert close(first, alone(generation, reads))
    assert close(other, first)


def test_prompts_of_different_length_get_separate_passes(generation: Nnsight08) -> None:
    assert together(generation, reads, longer) == [None, None]
    values = together(generation, reads, longer, edits, longer)
    assert close(values[1], alone(generation, longer))
    assert close(values[3], alone(generation, longer))
    assert close(values[0], alone(generation, reads))


def test_co_batched_pass_respects_token_limit(
    generation: Nnsight08, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndif.runtime.generations.co_batch_nnsight08._MAX_TOKENS", 14)
    values = together(generation, reads, edits, reads, reads)
    assert [row is None for row in values] == [False] * 4
    values = together(generation, reads, edits, reads)
    assert [row is None for row in values] == [False, False, True]


def test_single_eligible_block_is_not_co_batched(generation: Nnsight08) -> None:
    assert together(generation, reads) == [None]
    assert together(generation, reads, prints) == [None, None]
    assert together(generation) == []


def test_malformed_payload_is_left_out_of_co_batch(generation: Nnsight08) -> None:
    payloads = [b"", sent(generation, reads), b"nothing", sent(generation, reads)]
    values = generation.run_together(payloads)
    assert [row is None for row in values] == [True, False, True, False]


def test_co_batched_result_has_no_rows_of_other_blocks(generation: Nnsight08) -> None:
    many, *_ = together(generation, *[reads] * 8)
    few = alone(generation, reads)
    assert many is not None
    size = functools.partial(Result, max_bytes=1 << 30, max_inline=0)
    assert size(many).size <= size(few).size + 1000


def test_model_that_mixes_rows_is_not_co_batched(
    generation: Nnsight08, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples are batch normalization and experts with a limited token capacity."""
    head = generation.model._module.lm_head
    monkeypatch.setattr(generation, "_shared_passes", None)
    with head.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(0, keepdim=True),)):
        assert together(generation, edits, edits) == [None, None]
    monkeypatch.setattr(generation, "_shared_passes", None)
    assert None not in together(generation, edits, edits)


def test_co_batch_leaves_model_unchanged(generation: Nnsight08) -> None:
    model = generation.model
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model._module.modules()
    ]
    generation._shared_passes = None
    together(generation, reads, fails, edits, prints)
    assert hooks == [
        (len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in model._module.modules()
    ]
    assert model.interleaver.mediators == []
    assert not model.interleaver.interleaving
    assert close(alone(generation, reads), alone(generation, reads))


def test_older_generation_does_not_co_batch() -> None:
    assert Generation().run_together([b"", b""]) == [None, None]
