from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook
from torch.multiprocessing.reductions import reduce_tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from ndif.runtime.generations import create_generation
from ndif.runtime.process.cuda import Handle
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.weights import (
    ExportedWeights,
    ModelDevices,
    WeightsError,
    check,
    collect,
    install,
)
from tests.tiny_models import make_gpt2, make_llama

pytestmark = pytest.mark.process

PROMPT = "The Eiffel Tower is in"
ON_CPU = ModelDevices("cpu", None, {})


def make_tied_llama(folder: Path) -> Path:
    """Write a Llama with tied embeddings and custom generation settings."""
    make_llama(folder)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = True
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = True
    model.generation_config.top_k = 7
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[make_gpt2, make_llama, make_tied_llama])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path_factory.mktemp("model") / make.__name__)


def load(checkpoint: Path, placement: ModelDevices | None = None) -> Any:
    """Return the wrapper of a checkpoint; with `placement`, it is built without weights."""
    generation = create_generation("0.8")
    spec = ModelSpec(str(checkpoint), "0.8", task="text-generation", device="cpu")
    if placement is None:
        generation.load(spec)
    else:
        generation.load_meta(spec, placement)
    return generation.model


def export(tensors: Iterable[torch.Tensor]) -> list[Handle]:
    return [reduce_tensor(tensor) for tensor in tensors]


def moved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as another process receives them, except for the location of their memory."""
    exported: ExportedWeights = pickle.loads(pickle.dumps(ExportedWeights.of(tensors, export)))
    return exported.tensors()


def test_model_built_without_weights_otherwise_equals_loaded_model(checkpoint: Path) -> None:
    loaded, built = load(checkpoint), load(checkpoint, ON_CPU)
    assert all(tensor.is_meta for tensor in collect(built._module).values())
    check(built._module, collect(loaded._module))
    assert built.dispatched
    assert built.pipeline.device == torch.device("cpu")
    assert built.pipeline.model is built._module
    assert built._module.training == loaded._module.training is False
    assert built._module.config.to_dict() == loaded._module.config.to_dict()
    assert built._module.generation_config.to_dict() == loaded._module.generation_config.to_dict()
    assert built.tokenizer.padding_side == loaded.tokenizer.padding_side
    assert built.tokenizer(PROMPT) == loaded.tokenizer(PROMPT)
    names = [envoy.path for envoy in loaded.modules()]
    assert [envoy.path for envoy in built.modules()] == names


def test_model_with_installed_weights_computes_same_results(checkpoint: Path) -> None:
    loaded, built = load(checkpoint), load(checkpoint, ON_CPU)
    install(built._module, moved(collect(loaded._module)))
    assert built.device == torch.device("cpu")
    *expected, expected_text = results(loaded)
    *tensors, text = results(built)
    assert all(map(torch.equal, tensors, expected))
    assert text == expected_text


def results(model: Any) -> list[Any]:
    """Return a model's logits, and results that depend on more than its weights."""
    torch.manual_seed(0)
    tokens = model.tokenizer(PROMPT, return_tensors="pt")
    plain = model._module(**tokens).logits
    ids = model._module.generate(**tokens, max_new_tokens=3)
    text = model.pipeline(PROMPT, max_new_tokens=3)
    return [plain, ids, text]


def test_installed_tensors_equal_originals(checkpoint: Path) -> None:
    loaded, built = load(checkpoint)._module, load(checkpoint, ON_CPU)._module
    install(built, moved(collect(loaded)))
    before, after = collect(loaded), collect(built)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert type(after[name]) is type(tensor), name
        assert after[name].requires_grad == tensor.requires_grad, name
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    persistent = loaded.state_dict().keys()
    assert persistent == built.state_dict().keys()
    if "model.rotary_emb.inv_freq" in before:
        assert "model.rotary_emb.inv_freq" not in persistent


def test_tied_weights_stay_tied(checkpoint: Path) -> None:
    loaded, built = load(checkpoint)._module, load(checkpoint, ON_CPU)._module
    install(built, moved(collect(loaded)))
    tied = loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert tied == loaded.config.tie_word_embeddings
    assert (built.lm_head.weight is built.get_input_embeddings().weight) == tied
    assert len(list(built.parameters())) == len(list(loaded.parameters()))


def test_install_within_one_process_copies_nothing(checkpoint: Path) -> None:
    loaded, built = load(checkpoint)._module, load(checkpoint, ON_CPU)._module
    install(built, ExportedWeights.of(collect(loaded), export).tensors())
    for name, tensor in collect(loaded).items():
        assert collect(built)[name].data_ptr() == tensor.data_ptr(), name


def test_tensor_with_several_names_is_exported_once(tmp_path: Path) -> None:
    module = load(make_gpt2(tmp_path / "gpt2"))._module
    shared: list[torch.Tensor] = []

    def exporting(tensors: Iterable[torch.Tensor]) -> list[Handle]:
        shared.extend(tensors)
        return export(shared)

    exported = ExportedWeights.of(collect(module), exporting)
    assert len(exported.names) == len(exported.handles) + 1
    assert len({id(tensor) for tensor in shared}) == len(shared)
    assert exported.names["lm_head.weight"] == exported.names["transformer.wte.weight"]


class TestRefusals:
    """Weights that cannot be shared are refused when the model is loaded, not when it runs."""

    def test_install_into_different_model_is_refused(self) -> None:
        two, three = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
        with pytest.raises(WeightsError, match=r"other tensors.*: bias"):
            install(three, collect(two))
        with pytest.raises(WeightsError, match="bias"):
            install(two, collect(three))

    def test_weights_left_on_meta_device_are_refused(self) -> None:
        with pytest.raises(WeightsError, match="weight was left out"):
            ExportedWeights.of(collect(torch.nn.Linear(2, 2, device="meta")), export)

    def test_tensor_subclass_is_refused(self) -> None:
        class Packed(torch.nn.Parameter):
            pass

        module = torch.nn.Linear(2, 2)
        module.weight = Packed(module.weight.data)
        with pytest.raises(WeightsError, match="weight is a Packed"):
            ExportedWeights.of(collect(module), export)


def test_built_model_moves_values_like_dispatched_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that accelerate spread is rebuilt in another process and moves values at the same modules."""
    folder = make_llama(tmp_path / "llama")
    spread = AutoModelForCausalLM.from_pretrained(folder)
    # Two device names on a machine with one device: values can move between them, weights cannot.
    monkeypatch.setattr(AlignDevicesHook, "init_hook", lambda hook, module: module)
    device_map = {
        "model.embed_tokens": "cpu:0",
        "model.layers.0": "cpu:0",
        "model.layers.1": "cpu:0",
        "model.layers.2": "cpu:1",
        "model.layers.3": "cpu:1",
        "model.norm": "cpu:1",
        "model.rotary_emb": "cpu:1",
        "lm_head": "cpu:1",
    }
    dispatch_model(
        spread, device_map, main_device="cpu:0", skip_keys=spread._skip_keys_device_placement
    )
    placement: ModelDevices = pickle.loads(pickle.dumps(ModelDevices.of(spread)))

    built = load(folder, placement)
    tensors = collect(spread)
    install(built._module, tensors)
    assert built._module.hf_device_map == device_map
    for name, part in spread.named_modules():
        ours = built._module.get_submodule(name)
        assert hasattr(ours, "_hf_hook") == hasattr(part, "_hf_hook"), name
        if hasattr(part, "_hf_hook"):
            assert vars(ours._hf_hook).items() >= hook_arguments(part).items(), name
    # nnsight's wrapper is still outermost, and each hook behind it runs once.
    assert all(type(part.forward).__name__ == "Controller" for part in built._module.modules())
    calls: list[str] = []
    hook = built._module.model.layers[2]._hf_hook
    pre_forward = hook.pre_forward
    hook.pre_forward = lambda *args, **kwargs: calls.append("") or pre_forward(*args, **kwargs)
    tokens = built.tokenizer(PROMPT, return_tensors="pt")
    result = built._module(**tokens).logits
    assert calls == [""]
    assert torch.equal(result, load(folder)._module(**tokens).logits)
    for name, tensor in tensors.items():
        assert collect(built._module)[name] is tensor, name


def test_model_moved_to_other_devices_follows_new_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each move, the model moves values as its latest placement says."""
    folder = make_llama(tmp_path / "llama")
    monkeypatch.setattr(AlignDevicesHook, "init_hook", lambda hook, module: module)
    placements = [spread_after(folder, layers) for layers in (1, 3)]
    whole = ModelDevices("cpu", {"": "cpu"}, {})
    built = load(folder, placements[0])
    generation = create_generation("0.8")
    generation.model = built
    tensors = collect(load(folder)._module)
    install(built._module, tensors)
    tokens = built.tokenizer(PROMPT, return_tensors="pt")
    truth = load(folder)._module(**tokens).logits
    for placement in (placements[1], whole, placements[0], whole):
        generation.move(placement)
        assert built._module.hf_device_map == placement.device_map
        hooked = {n for n, part in built._module.named_modules() if hasattr(part, "_hf_hook")}
        assert hooked == placement.hooks.keys()
        for name in hooked:
            part = built._module.get_submodule(name)
            assert hook_arguments(part) == placement.hooks[name], name
        assert all(type(part.forward).__name__ == "Controller" for part in built._module.modules())
        assert torch.equal(built._module(**tokens).logits, truth)


def spread_after(folder: Path, layers: int) -> ModelDevices:
    """Return accelerate's placement of a model whose layers are split after the first `layers`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    first = ["model.embed_tokens", *(f"model.layers.{n}" for n in range(layers))]
    rest = [f"model.layers.{n}" for n in range(layers, 4)]
    second = [*rest, "model.norm", "model.rotary_emb", "lm_head"]
    device_map = {**dict.fromkeys(first, "cpu:0"), **dict.fromkeys(second, "cpu:1")}
    dispatch_model(
        model, device_map, main_device="cpu:0", skip_keys=model._skip_keys_device_placement
    )
    return ModelDevices.of(model)


def hook_arguments(part: Any) -> dict[str, Any]:
    hook = part._hf_hook
    return {name: vars(hook)[name] for name in ("execution_device", "io_same_device", "skip_keys")}


_WITHOUT_CUDA = """
import sys
import nnsight, peft, torch, transformers.pipelines  # with CUDA's build these import other things
from transformers.models.gpt2 import modeling_gpt2
from transformers.utils import import_utils

for value in vars(import_utils).values():
    if hasattr(value, "cache_clear"):
        value.cache_clear()

def start(*_):
    raise RuntimeError("CUDA was started")

torch.cuda._is_compiled = lambda: True
torch.cuda._lazy_init = start
torch._C._cuda_getDeviceCount = start
torch.backends.cuda.is_built = lambda: True

from ndif.runtime.process import cuda
from ndif.runtime.generations import create_generation
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights.weights import ModelDevices

cuda._count_devices = lambda: 1
spec = ModelSpec(sys.argv[1], "0.8", task="text-generation", device="cuda:0")
driver = cuda.Cuda()
assert driver.uses_devices(spec)
assert driver.select(spec) == spec
assert torch.cuda.is_available()
generation = create_generation("0.8")
generation.load_meta(spec, ModelDevices("cuda:0", None, {}))
assert generation.model.pipeline.device == torch.device("cuda:0")
assert driver.find_early_start() is None
"""


def test_building_a_model_for_gpus_starts_no_cuda(tmp_path: Path) -> None:
    folder = make_gpt2(tmp_path / "gpt2")
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CUDA, folder], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
