"""Structures of models: real architectures and hostile modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    T5Config,
    T5Model,
    XmodConfig,
)

from ndif.runtime.structure import MAX_BYTES, describe_structure, structure_or_none
from ndif.runtime.weights.card import license_of, read_license
from ndif.schema.structure import ModelStructure, ModuleNode, read_structure

HOSTILE = "<img src=x onerror=alert(1)>"


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def structure_of(module: Any, folder: Path) -> ModelStructure:
    """Return a structure as the host reads it."""
    text = json.dumps(describe_structure(module, folder))
    assert len(text) <= MAX_BYTES
    structure = read_structure(text)
    assert structure is not None
    assert read_structure(structure.dump()) == structure
    return structure


def nodes(node: ModuleNode, path: str = "") -> Iterator[tuple[str, ModuleNode]]:
    """Yield every node with its path in torch's spelling."""
    yield path, node
    for child in node.children:
        yield from nodes(child, f"{path}.{child.name}" if path else child.name)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: AutoModelForCausalLM.from_config(GPT2Config(n_layer=3)),
    "llama": lambda: AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=3)),
    "bert": lambda: AutoModelForMaskedLM.from_config(BertConfig(num_hidden_layers=3)),
    "t5": lambda: T5Model(T5Config(num_layers=3)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_structure_describes_every_module_once(name: str, tmp_path: Path) -> None:
    module = on_meta(ARCHITECTURES[name])
    structure = structure_of(module, tmp_path)
    described = dict(nodes(structure.tree))
    modules = dict(module.named_modules())
    for path, node in described.items():
        part = modules[path]
        assert node.class_name == type(part).__name__
        own = {parameter.name: (parameter.shape, parameter.dtype) for parameter in node.parameters}
        assert own == {
            parameter_name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for parameter_name, tensor in part.named_parameters(recurse=False)
        }
        assert node.count == sum(parameter.numel() for parameter in part.parameters())
        assert node.omitted == 0
    # Each folded node equals the modules that it stands for.
    folded = [(path, node) for path, node in described.items() if node.indices is not None]
    for path, node in folded:
        parent = path.rpartition(".")[0]
        for first, last in node.indices or ():
            for index in range(first, last + 1):
                assert str(modules[f"{parent}.{index}"]) == str(modules[path])
    assert max(node.number for _, node in folded) >= 2


def test_structure_of_70b_model_takes_few_kilobytes(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    module = on_meta(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    structure = structure_of(module, tmp_path)
    assert len(json.dumps(describe_structure(module, tmp_path))) < 4096
    assert structure.tree.count == 70_553_706_496
    assert (structure.dtype, structure.bytes // 10**9) == ("bfloat16", 141)
    facts = (
        structure.hidden_size,
        structure.layers,
        structure.heads,
        structure.vocabulary,
        structure.context_length,
    )
    assert facts == (8192, 80, 64, 128256, 8192)
    (layers,) = (node for _, node in nodes(structure.tree) if node.number > 1)
    assert (layers.class_name, layers.indices) == ("LlamaDecoderLayer", [(0, 79)])


def test_different_modules_are_described_separately(tmp_path: Path) -> None:
    small, large = (lambda: torch.nn.Linear(2, 2)), (lambda: torch.nn.Linear(2, 4))
    mixed = [small(), large(), small(), small(), large()]
    module = torch.nn.Module()
    module.blocks = torch.nn.ModuleList(mixed)
    (blocks,) = structure_of(module, tmp_path).tree.children
    assert [(child.name, child.indices) for child in blocks.children] == [
        ("0", [(0, 0), (2, 3)]),
        ("1", [(1, 1), (4, 4)]),
    ]


def test_names_from_config_are_kept_as_text(tmp_path: Path) -> None:
    """Adapters of X-MOD are modules that the repository's config names."""
    config = XmodConfig(is_decoder=True, languages=[HOSTILE, "en_XX"], num_hidden_layers=2)
    structure = structure_of(on_meta(lambda: AutoModelForCausalLM.from_config(config)), tmp_path)
    assert HOSTILE in {node.name for _, node in nodes(structure.tree)}


def wide() -> torch.nn.Module:
    module = torch.nn.Module()
    for number in range(5000):
        module.add_module(f"m{number}", torch.nn.Module())
    return module


def deep() -> torch.nn.Module:
    module = torch.nn.Module()
    for _ in range(200):
        around = torch.nn.Module()
        around.inner = module
        module = around
    return module


def uneven() -> torch.nn.Module:
    return torch.nn.ModuleList(
        torch.nn.ModuleList(torch.nn.Linear(a + 1, b + 1) for b in range(60)) for a in range(60)
    )


def alternating() -> torch.nn.Module:
    return torch.nn.ModuleList(torch.nn.Linear(1, 1 + number % 2) for number in range(4000))


def long_names() -> torch.nn.Module:
    module = torch.nn.Module()
    for number in range(200):
        module.add_module(f"{number}{'é' * 120}", torch.nn.Linear(1, 1))
    module.add_module("x" * 100_000, torch.nn.Linear(1, 1))
    return module


def many_parameters() -> torch.nn.Module:
    return torch.nn.ParameterList(torch.zeros(1) for _ in range(5000))


@pytest.mark.parametrize("make", [wide, deep, uneven, alternating, long_names, many_parameters])
def test_structure_size_is_bounded(make: Callable[[], torch.nn.Module], tmp_path: Path) -> None:
    module = make()
    structure = structure_of(module, tmp_path)
    assert structure.tree.count == sum(parameter.numel() for parameter in module.parameters())
    if make is not many_parameters:
        assert sum(node.omitted for _, node in nodes(structure.tree)) > 0


def test_undescribable_model_has_no_structure(tmp_path: Path) -> None:
    class Broken(torch.nn.Module):
        def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
            raise ValueError("not today")

    assert structure_or_none(Broken(), tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        "{}",
        "[" * 100_000,
        json.dumps({"tree": {}}),
        " " * (1 << 18),
        {"tree": {"name": "", "class": "A", "parameters": [], "count": -1}},
    ],
    ids=lambda content: repr(content)[:20],
)
def test_malformed_structure_reads_as_none(content: Any) -> None:
    assert read_structure(content) is None


def test_license_is_read_from_model_card(tmp_path: Path) -> None:
    assert read_license(tmp_path) is None
    for card, expected in (
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# A model\n", "apache-2.0"),
        ('---\r\nlanguage: en\r\nlicense: "mit"\r\n---\r\n', "mit"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        (f"---\nlicense: {HOSTILE}\n---\n", None),
        ("license: mit\n", None),
        (f"---\n{'x' * 100_000}\nlicense: mit\n---\n", None),
    ):
        (tmp_path / "README.md").write_bytes(card.encode())
        assert read_license(tmp_path) == expected, card[:40]
    assert license_of(["transformers", "license:llama3.1"]) == "llama3.1"
    assert license_of([]) is license_of(None) is None
