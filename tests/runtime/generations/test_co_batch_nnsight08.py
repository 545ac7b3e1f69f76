"""Traces of several users in one forward pass: each has the values that it has alone, or runs alone."""

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
    made = create_generation("0.8")
    made.load(ModelSpec(checkpoint=str(folder), generation="0.8", task="text-generation"))
    assert isinstance(made, Nnsight08)
    return made


@pytest.fixture(autouse=True)
def _forgotten(generation: Nnsight08) -> Iterator[None]:
    yield
    generation.forget()


def sent(generation: Nnsight08, block: Block) -> bytes:
    made = Sent()
    block(generation.model, made)
    return made.payload


def alone(generation: Nnsight08, block: Block) -> dict[str, Any]:
    values = generation.run(sent(generation, block), STREAM)
    generation.forget()
    return values


def together(generation: Nnsight08, *blocks: Block) -> list[dict[str, Any] | None]:
    return generation.run_together([sent(generation, each) for each in blocks])


def close(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.allclose(left, right, atol=1e-5)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(close(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(close, left, right))
    return bool(left == pytest.approx(right, abs=1e-4))


@pytest.mark.parametrize("block", ROW_WISE)
def test_each_has_the_values_that_it_has_alone(generation: Nnsight08, block: Block) -> None:
    for found in together(generation, block, *ROW_WISE, block):
        assert found is not None
    first, *_, last = together(generation, block, *ROW_WISE, block)
    expected = alone(generation, block)
    assert expected
    assert close(first, expected)
    assert close(last, expected)


@pytest.mark.parametrize("block", [has_another_shape, takes_all_but_a_row, widens])
def test_an_assignment_that_others_would_notice_runs_alone(
    generation: Nnsight08, block: Block
) -> None:
    first, other, last = together(generation, assigns, block, assigns)
    assert other is None
    assert close(first, alone(generation, assigns))
    assert close(last, first)


def test_assignments_have_a_pass_of_their_own(generation: Nnsight08) -> None:
    found = together(generation, assigns, edits, assigns, reads)
    expected = alone(generation, assigns)
    assert close(found[0], expected)
    assert close(found[2], expected)
    assert close(found[1], alone(generation, edits))
    assert close(found[3], alone(generation, reads))


def test_nothing_is_assigned_where_the_model_writes_later(
    generation: Nnsight08, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = generation.model
    parts = model.transformer.h if hasattr(model._module, "transformer") else model.model.layers
    monkeypatch.setattr(generation, "_together", None)

    def write(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        args[0].add_(0)

    with parts[1]._module.register_forward_pre_hook(write):
        assert together(generation, assigns, assigns) == [None, None]
        assert None not in together(generation, reads, reads)
    monkeypatch.setattr(generation, "_together", None)


def test_views_are_sent_without_what_they_are_of(generation: Nnsight08) -> None:
    for found in together(generation, expands, expands, reads)[:2]:
        assert found is not None
        assert close(found, alone(generation, expands))
        sizes = {name: value.untyped_storage().nbytes() for name, value in found.items()}
        assert sizes["last"] <= found["last"].numel() * 4
        assert sizes["turned"] == found["turned"].numel() * 4


def test_what_is_saved_is_each_blocks_own(generation: Nnsight08) -> None:
    """An id of a saved object that is gone may be that of another block's object."""
    for _ in range(5):
        blocks = [frees_what_it_saved, saves_little] * 4
        found = together(generation, *blocks)
        assert [list(each or ()) for each in found] == [["hidden"], ["mean"]] * 4


@pytest.mark.parametrize(
    "config", [{"num_local_experts": 8}, {"quantization_config": {"quant_method": "x"}}]
)
def test_some_models_run_each_alone(
    generation: Nnsight08, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    monkeypatch.setattr(generation, "_together", None)
    for name, value in config.items():
        monkeypatch.setattr(generation.model._module.config, name, value, raising=False)
    assert together(generation, reads, reads) == [None, None]
    generation._together = None


@pytest.mark.parametrize("block", OTHERS)
def test_what_may_notice_others_runs_alone(generation: Nnsight08, block: Block) -> None:
    first, other, last = together(generation, reads, block, edits)
    assert other is None
    assert close(first, alone(generation, reads))
    assert close(last, alone(generation, edits))


@pytest.mark.parametrize("block", [fails, waits_for_the_past, has_another_shape])
def test_one_that_fails_costs_the_others_nothing(generation: Nnsight08, block: Block) -> None:
    first, other, last = together(generation, loops, block, edits)
    assert other is None
    # A list of the script is filled once, although the block began twice.
    assert close(first, alone(generation, loops))
    assert close(last, alone(generation, edits))
    with pytest.raises(BlockError):
        alone(generation, block)


def test_the_older_name_of_a_model_is_as_good(generation: Nnsight08) -> None:
    with pytest.warns(Warning, match="LanguageModel is deprecated"):
        client = LanguageModel(generation.model.repo_id)
    made = Sent()
    reads(client, made)
    first, other = generation.run_together([made.payload, sent(generation, reads)])
    assert close(first, alone(generation, reads))
    assert close(other, first)


def test_prompts_of_another_length_have_a_pass_of_their_own(generation: Nnsight08) -> None:
    assert together(generation, reads, longer) == [None, None]
    found = together(generation, reads, longer, edits, longer)
    assert close(found[1], alone(generation, longer))
    assert close(found[3], alone(generation, longer))
    assert close(found[0], alone(generation, reads))


def test_long_prompts_are_not_put_together(
    generation: Nnsight08, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ndif.runtime.generations.co_batch_nnsight08._MOST_TOKENS", 14)
    found = together(generation, reads, edits, reads, reads)
    assert [each is None for each in found] == [False] * 4
    found = together(generation, reads, edits, reads)
    assert [each is None for each in found] == [False, False, True]


def test_one_by_itself_is_not_a_company(generation: Nnsight08) -> None:
    assert together(generation, reads) == [None]
    assert together(generation, reads, prints) == [None, None]
    assert together(generation) == []


def test_what_is_no_request_is_none_here_either(generation: Nnsight08) -> None:
    payloads = [b"", sent(generation, reads), b"nothing", sent(generation, reads)]
    found = generation.run_together(payloads)
    assert [each is None for each in found] == [True, False, True, False]


def test_a_result_has_no_rows_of_others(generation: Nnsight08) -> None:
    many, *_ = together(generation, *[reads] * 8)
    few = alone(generation, reads)
    assert many is not None
    size = functools.partial(Result, max_bytes=1 << 30, max_inline=0)
    assert size(many).size <= size(few).size + 1000


def test_a_model_that_mixes_its_rows_runs_each_alone(
    generation: Nnsight08, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that normalizes over a batch, or whose experts have room for so many tokens."""
    head = generation.model._module.lm_head
    monkeypatch.setattr(generation, "_together", None)
    with head.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(0, keepdim=True),)):
        assert together(generation, edits, edits) == [None, None]
    monkeypatch.setattr(generation, "_together", None)
    assert None not in together(generation, edits, edits)


def test_the_model_is_as_before(generation: Nnsight08) -> None:
    model = generation.model
    hooks = [
        (len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model._module.modules()
    ]
    generation._together = None
    together(generation, reads, fails, edits, prints)
    assert hooks == [
        (len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model._module.modules()
    ]
    assert model.interleaver.mediators == []
    assert not model.interleaver.interleaving
    assert close(alone(generation, reads), alone(generation, reads))


def test_an_older_generation_runs_each_alone() -> None:
    assert Generation().run_together([b"", b""]) == [None, None]
