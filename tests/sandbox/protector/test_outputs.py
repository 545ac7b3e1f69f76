"""Outputs of models, caches and encodings can be sent again, with all their parts.

An object of each class that model runs return is pickled like a client does, and loaded under a policy.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from nnsight.intervention import cache as nnsights
from nnsight.intervention import serialization
from transformers import cache_utils
from transformers.utils.generic import ModelOutput

from ndif.sandbox.protector.placeholders import Placeholder
from tests import tiny_models
from tests.sandbox.protector.running import guarded, loaded

FORWARD = {"output_hidden_states": True, "output_attentions": True, "return_dict": True}
GENERATE = {
    "max_new_tokens": 3,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "do_sample": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
    "without a cache": {"use_cache": False},
}
"""Ways to generate, each with specific classes."""

IDS = torch.tensor([[5, 6, 7, 8]])
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "head_dim": 16,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding windows": ("Gemma2", {**SMALL, **HEADS, "sliding_window": 3}),
    "states": ("Mamba", {**SMALL, "state_size": 4}),
    "states of another kind": ("FalconMamba", {**SMALL, "state_size": 4}),
    "convolutions": ("Lfm2", {**SMALL, **HEADS, "layer_types": ["conv", "full_attention"]}),
    "linear attention": (
        "Qwen3Next",
        {
            **SMALL,
            **HEADS,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 0,
            "mlp_only_layers": [0, 1],
        },
    ),
}
"""Architectures with special cache classes, and their configurations."""


def make_model(name: str, folder: Path) -> Any:
    """Return a tiny model that can return its attention weights."""
    make: Callable[[Path], Path] = getattr(tiny_models, f"make_{name}")
    kinds: dict[str, Any] = {
        "bert": transformers.AutoModelForMaskedLM,
        "t5": transformers.T5ForConditionalGeneration,
    }
    kind = kinds.get(name, transformers.AutoModelForCausalLM)
    return kind.from_pretrained(make(folder / name), attn_implementation="eager").eval()


def of_architecture(name: str, options: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def runs(model: Any) -> Iterator[Any]:
    """Yield a model's outputs: one forward pass, and each way to generate."""
    given: dict[str, Any] = {"input_ids": IDS}
    more = {"output_attentions": hasattr(model.config, "num_attention_heads")}
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            yield model(**given, decoder_input_ids=IDS, use_cache=True, **FORWARD)
        else:
            yield model(**given, **{**FORWARD, **more})
        if model.can_generate():
            for way in WAYS.values():
                try:
                    yield model.generate(**given, **{**GENERATE, **more, **way})
                except (ValueError, TypeError, NotImplementedError):
                    if not way:
                        raise  # every model generates greedily; some lack beams or a static cache


def parts(value: Any, visited: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yield an object and all its parts, once each."""
    visited = {} if visited is None else visited
    if id(value) in visited or isinstance(value, type):
        return
    visited[id(value)] = value
    yield value
    if isinstance(value, torch.Tensor):
        return
    within: list[Any] = []
    if isinstance(value, Mapping):
        within += [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        within += value
    within += getattr(value, "__dict__", {}).values()
    for part in within:
        yield from parts(part, visited)


def of_each_class(values: Iterator[Any]) -> dict[type, Any]:
    """Return the first object of each class."""
    objects: dict[type, Any] = {}
    for value in values:
        for part in parts(value):
            objects.setdefault(type(part), part)
    return objects


def sent(value: Any) -> Any:
    """Return a value that a client sent, as a block receives it."""
    return loaded(serialization.dumps(value))


def assert_same(left: Any, other: Any) -> None:
    """Check that two objects have equal classes and equal parts."""
    assert type(left) is type(other), (type(left), type(other))
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, other)
    elif isinstance(left, type | str | int | float | torch.dtype | torch.device):
        assert left == other
    elif isinstance(left, Mapping):
        assert [*left] == [*other]
        for key in left:
            assert_same(left[key], other[key])
    elif isinstance(left, list | tuple):
        for pair in zip(left, other, strict=True):
            assert_same(*pair)
    if hasattr(left, "__dict__") and not isinstance(left, type | torch.Tensor):
        assert_same(vars(left), vars(other))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_every_output_object_of_model_can_be_sent(name: str, tmp_path: Path) -> None:
    objects = of_each_class(runs(make_model(name, tmp_path)))
    assert any(issubclass(cls, ModelOutput) for cls in objects)
    for value in objects.values():
        assert_same(sent(value), value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_output_object_of_architecture_can_be_sent(kind: str) -> None:
    objects = of_each_class(runs(of_architecture(*ARCHITECTURES[kind])))
    assert any("ache" in cls.__name__ for cls in objects)
    for value in objects.values():
        assert_same(sent(value), value)


def test_sent_cache_continues_where_it_was(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    with torch.no_grad():
        whole = model(IDS).logits[:, -1]
        for cache in (None, transformers.StaticCache(config=model.config, max_cache_len=8)):
            kept = model(IDS[:, :-1], past_key_values=cache, use_cache=True).past_key_values
            again = sent(kept)
            torch.testing.assert_close(
                model(IDS[:, -1:], past_key_values=again).logits[:, -1], whole
            )
            # The original cache is unchanged.
            assert kept.get_seq_length() == IDS.shape[1] - 1


def test_sent_model_output_is_usable_in_block(tmp_path: Path) -> None:
    model = make_model("gpt2", tmp_path)
    with torch.no_grad():
        output = model.generate(IDS, **GENERATE)
    uses = "value.sequences, value['scores'][0], value.past_key_values.layers[1].keys, value[0], len(value)"
    scope = guarded(f"found = [{uses}]", value=sent(output))
    assert_same(scope["found"], eval(f"[{uses}]", {"value": output}))


def subclasses_in(package: str, *bases: type) -> Iterator[type]:
    """Yield the subclasses of `bases` that a module or a package's modules define."""
    module = importlib.import_module(package)
    below = [
        submodule.name
        for submodule in pkgutil.iter_modules(getattr(module, "__path__", []), f"{package}.")
    ]
    for name in (package, *below):
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, bases) and value.__module__ == name:
                yield value


CACHES = [
    *subclasses_in(
        "transformers.cache_utils",
        cache_utils.Cache,
        cache_utils.CacheLayerMixin,
        cache_utils.LinearAttentionCacheLayerMixin,
    )
]


@pytest.mark.parametrize("cls", CACHES, ids=lambda cls: cls.__name__)
def test_every_cache_class_can_be_sent(cls: type) -> None:
    """A cache may need another library, but its state is tensors and numbers."""
    assert loaded(serialization.dumps(cls)) is cls
    if not inspect.isabstract(cls):
        value = cls.__new__(cls)
        vars(value).update(keys=torch.ones(2), layers=[], is_initialized=True, offloading=False)
        assert_same(vars(sent(value)), vars(value))


PLAIN = [
    ("transformers.models.xlstm.modeling_xlstm", "xLSTMCache"),
    ("transformers.models.reformer.modeling_reformer", "ReformerDynamicCache"),
]


@pytest.mark.parametrize(("module", "name"), PLAIN)
def test_architecture_specific_cache_can_be_sent(module: str, name: str) -> None:
    cls = getattr(importlib.import_module(module), name)
    value = cls.__new__(cls)
    vars(value).update(states=[torch.ones(2)], seqlen_offset=3)
    assert_same(sent(value), value)


OUTPUTS = [
    *subclasses_in("transformers.modeling_outputs", ModelOutput),
    *subclasses_in("transformers.generation.utils", ModelOutput),
    *subclasses_in("transformers.models.gpt2.modeling_gpt2", ModelOutput),
    *subclasses_in("transformers.models.rag.modeling_rag", ModelOutput),
]


def test_every_model_output_class_can_be_sent() -> None:
    assert len(OUTPUTS) > 40
    for cls in OUTPUTS:
        assert dataclasses.is_dataclass(cls)
        first, *others = (field.name for field in dataclasses.fields(cls))
        value = cls(
            **{first: torch.ones(2), **{name: (torch.ones(1), torch.zeros(1)) for name in others}}
        )
        assert_same(sent(value), value)
        assert_same(sent(cls(torch.ones(2))), cls(torch.ones(2)))


@pytest.mark.filterwarnings("ignore")
def test_tokenizer_outputs_can_be_sent(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_models.make_gpt2(tmp_path))
    batch = tokenizer(["The Eiffel Tower"], return_tensors="pt")
    back = sent(batch)
    assert_same(dict(back), dict(batch))
    assert back.tokens() == batch.tokens()
    encoding = sent(batch[0])
    assert (type(encoding), encoding.tokens) == (tokenizers.Encoding, batch[0].tokens)
    for value in (batch.token_to_chars(0), batch.word_to_tokens(0), tokenizer.added_tokens_decoder):
        assert sent(value) == value
    use = "value.input_ids.tolist(), value[0].ids, value['attention_mask'].tolist()"
    assert guarded(f"found = [{use}]", value=back)["found"] == eval(f"[{use}]", {"value": batch})


def test_model_and_generation_configs_can_be_sent(tmp_path: Path) -> None:
    model = make_model("gpt2", tmp_path)
    for value in (model.config, model.generation_config):
        back = sent(value)
        assert (type(back), back.to_dict()) == (type(value), value.to_dict())


def test_recorded_nnsight_entry_can_be_sent() -> None:
    entry = nnsights.Entry(output=torch.ones(2), inputs=((torch.zeros(1),), {}))
    assert_same(sent({"model.h.0": [entry]}), {"model.h.0": [entry]})


REFUSED = {
    "a part of a model": "transformers.models.gpt2.modeling_gpt2\nGPT2Attention",
    "a model": "transformers.models.gpt2.modeling_gpt2\nGPT2LMHeadModel",
    "what generates": "transformers.generation.utils\nGenerationMixin",
    "what loads": "transformers.processing_utils\nProcessorMixin",
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_and_processor_classes_become_placeholders(name: str) -> None:
    for opcodes in (")R.", ")\x81."):
        assert (
            type(loaded(f"c{REFUSED[name]}\n".encode() + opcodes.encode("latin-1"))) is Placeholder
        )
