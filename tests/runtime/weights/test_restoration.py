"""Restoration of changed weights from the first source that has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ndif.runtime.weights.checksum import WeightChecksum
from ndif.runtime.weights.restoration import from_safetensors, restore
from ndif.runtime.weights.weights import WeightsError, collect
from tests.tiny_models import make_gpt2, make_llama


class Sourced:
    """A source that records the requested names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.asked: list[list[str]] = []

    def __call__(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        self.asked.append([*names])
        return {name: self._tensors[name] for name in names if name in self._tensors}


def test_next_source_is_asked_for_weights_the_first_lacked() -> None:
    held = {name: torch.full((4,), float(number)) for number, name in enumerate("abcd")}
    right = {name: tensor.clone() for name, tensor in held.items()}
    checksum = WeightChecksum.of(held)
    for name in "abc":
        held[name].add_(1)
    first = Sourced({"a": right["a"], "b": torch.zeros(3), "c": torch.zeros(4)})
    second = Sourced(right)
    restore(held, checksum.find_changed(held), [first, second, Sourced({})], checksum.find_changed)
    assert all(torch.equal(held[name], right[name]) for name in held)
    assert first.asked == [["a", "b", "c"]]
    assert second.asked == [["b", "c"]]


def test_error_names_weights_that_no_source_has() -> None:
    held = {"a": torch.ones(4), "b": torch.ones(4)}
    checksum = WeightChecksum.of(held)
    held["b"].zero_()
    with pytest.raises(WeightsError, match=r"could not be restored: b$"):
        restore(held, ["b"], [Sourced({}), Sourced({"b": torch.zeros(4)})], checksum.find_changed)


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changed_weights_are_restored_from_checkpoint_files(
    make: Callable[[Path], Path], sharded: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    if sharded:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
        assert (folder / "model.safetensors.index.json").exists()
    held = collect(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    checksum = WeightChecksum.of(held)
    parameters = [name for name, tensor in held.items() if isinstance(tensor, torch.nn.Parameter)]
    with torch.no_grad():
        for name in parameters:
            held[name].zero_()
    changed = checksum.find_changed(held)
    assert changed
    restore(held, changed, [from_safetensors(folder)], checksum.find_changed)
    assert checksum.find_changed(held) == []


def test_weight_is_found_under_any_prefix_in_files(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    held = collect(AutoModelForCausalLM.from_pretrained(folder))
    name = "transformer.h.0.attn.c_attn.weight"
    for spelled in (name, name.removeprefix("transformer."), f"module.{name}"):
        other = shutil.copytree(folder, tmp_path / spelled)
        renamed = {spelled if key == name else key: value for key, value in stored.items()}
        save_file(renamed, other / "model.safetensors")
        tensors = from_safetensors(other)([name])
        assert torch.equal(tensors[name], held[name])
    assert from_safetensors(tmp_path)([name]) == {}
