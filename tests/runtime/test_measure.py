"""Sizes computed from configs and checkpoint files, compared with loaded models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
)

from ndif.runtime.measure import UnknownError, evaluate
from ndif.runtime.spec import ModelSpec
from tests.tiny_models import make_bert, make_gpt2, make_llama

TEXT, MASK = "text-generation", "fill-mask"


def measured(folder: Path, task: str, dtype: str = "auto") -> tuple[int, int]:
    facts = evaluate(ModelSpec(str(folder), "0.8", task=task, dtype=dtype, pickled=True), folder)
    return facts.bytes, facts.parameters


def loaded(folder: Path, kind: Any, dtype: str = "auto") -> tuple[int, int]:
    model = kind.from_pretrained(folder, dtype=dtype)
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.nbytes for t in tensors), sum(p.numel() for p in model.parameters())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def changed(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def a_base(folder: Path) -> Path:
    make_gpt2(folder)
    GPT2Model.from_pretrained(folder).save_pretrained(folder)
    return folder


def an_untied_base(folder: Path) -> Path:
    """Write a Llama whose file lacks the head, which is as large as the embedding."""
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).model.save_pretrained(folder)
    return folder


def a_tied_one(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    assert "lm_head.weight" not in tensors_of(folder)
    return folder


def shards(folder: Path) -> Path:
    make_llama(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def pickles(folder: Path) -> Path:
    make_gpt2(folder)
    torch.save(tensors_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def masks_of_old(folder: Path) -> Path:
    """Write a GPT-2 whose file has attention masks, which models no longer load."""
    make_gpt2(folder)
    masks = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 256, 256) for layer in range(4)}
    save_file({**tensors_of(folder), **masks}, folder / "model.safetensors", {"format": "pt"})
    return folder


def doubles(folder: Path) -> Path:
    """Write shards whose float64 dtype is in the index and not in the config."""
    shards(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["metadata"]["dtype"] = "float64"
    file.write_text(json.dumps(index))
    changed(folder, dtype=None)
    return folder


HONEST: dict[str, tuple[Callable[[Path], Path], str, Any]] = {
    "a base under a head that is tied": (a_base, TEXT, AutoModelForCausalLM),
    "a base under a head that is not": (an_untied_base, TEXT, AutoModelForCausalLM),
    "tied weights": (a_tied_one, TEXT, AutoModelForCausalLM),
    "shards": (shards, TEXT, AutoModelForCausalLM),
    "pickles": (pickles, TEXT, AutoModelForCausalLM),
    "a head that the task leaves out": (make_bert, "feature-extraction", AutoModel),
    "a head that is new": (
        make_bert,
        "text-classification",
        AutoModelForSequenceClassification,
    ),
    "masks that old files have": (masks_of_old, TEXT, AutoModelForCausalLM),
    "a dtype that the index names": (doubles, TEXT, AutoModelForCausalLM),
    "a model with all its weights": (make_bert, MASK, AutoModelForMaskedLM),
}


@pytest.mark.parametrize("name", HONEST)
def test_measured_size_equals_loaded_model(name: str, tmp_path: Path) -> None:
    make, task, kind = HONEST[name]
    folder = make(tmp_path / "model")
    for dtype in ("auto", "bfloat16"):
        assert measured(folder, task, dtype) == loaded(folder, kind, dtype), dtype


def test_packed_weights_are_measured_unpacked(tmp_path: Path) -> None:
    """The measurement runs no quantizer: it returns the unquantized size, which is never too small."""
    folder = make_gpt2(tmp_path / "model")
    whole = measured(folder, TEXT)
    packed = {}
    for name, tensor in tensors_of(folder).items():
        is_packed = tensor.dim() == 2 and ".h." in name
        packed[f"{name}.q" if is_packed else name] = (
            torch.zeros(tensor.numel() // 8, dtype=torch.int32) if is_packed else tensor
        )
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    changed(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert measured(folder, TEXT) == whole


def test_unused_tensors_in_files_count_towards_size(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path / "model")
    size, parameters = measured(folder, TEXT)
    hidden = torch.zeros(5_000_000)
    save_file({**tensors_of(folder), "hidden": hidden}, folder / "model.safetensors")
    size_and_count = measured(folder, TEXT)
    assert size_and_count[1] == parameters
    # Everything beyond twice the model's size and the size of a head.
    assert size_and_count[0] - size == (hidden.numel() - parameters - (1 << 20)) * 4


DISAGREEING: dict[str, dict[str, Any]] = {
    "a wider model": {"n_inner": 4096},
    "a larger vocabulary": {"vocab_size": 10**9},
    "a smaller vocabulary": {"vocab_size": 8},
    "more layers": {"n_layer": 100},
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_config_that_mismatches_weights_is_refused(name: str, tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path / "model")
    changed(folder, **DISAGREEING[name])
    with pytest.raises(UnknownError, match="does not belong to its weights"):
        measured(folder, TEXT)
