"""The placement of a model's parts on GPUs, computed without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ndif.runtime.process.weight_owner import owner_shares, runner_shares
from ndif.runtime.spec import ModelSpec
from ndif.runtime.typed_json import from_json, to_json
from ndif.runtime.weights.weights import WeightsError, collect, load_arguments, move, place, spread
from tests.runtime.process.pretend_driver import PretendDriver
from tests.tiny_models import make_gpt2, make_llama

GIB = 1 << 30


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_llama(tmp_path_factory.mktemp("models") / "llama")
    return AutoModelForCausalLM.from_pretrained(folder)


def size(module: Any) -> int:
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


PLAIN = {"dtype": "auto", "trust_remote_code": False}


class TestLoadArguments:
    """The arguments for transformers, by the given memory."""

    def test_one_gpu_gives_device_map_of_that_gpu(self) -> None:
        spec = ModelSpec("m", "0.8", device="auto", max_memory={3: GIB})
        assert load_arguments(spec) == {**PLAIN, "device_map": "cuda:3"}

    def test_several_gpus_give_auto_device_map_with_max_memory(self) -> None:
        spec = ModelSpec("m", "0.8", device="auto", max_memory={1: GIB, 2: 2 * GIB})
        assert load_arguments(spec) == {
            **PLAIN,
            "device_map": "auto",
            "max_memory": {1: GIB, 2: 2 * GIB},
        }

    @pytest.mark.parametrize("device", ["cpu", "meta", "cuda:0"])
    def test_named_device_overrides_max_memory(self, device: str) -> None:
        spec = ModelSpec("m", "0.8", device=device, max_memory={1: GIB, 2: GIB})
        expected = {} if device == "cpu" else {"device_map": device}
        assert load_arguments(spec) == {**PLAIN, **expected}

    def test_model_spec_survives_json_round_trip(self) -> None:
        spec = ModelSpec("m", "0.8", max_memory={0: GIB, 10: 7}, trust_remote_code=True)
        assert from_json(ModelSpec, to_json(spec)) == spec


def test_model_is_spread_within_given_memory(llama: Any) -> None:
    room = {1: size(llama), 3: size(llama)}
    devices = spread(llama, room)
    assert set(devices.values()) == {1, 3}
    layers = llama.model.layers
    taken = dict.fromkeys(room, 0)
    for name, device in devices.items():
        taken[device] += size(llama.get_submodule(name))
        assert not name.startswith("model.layers.") or name.count(".") == 2, "a layer was split"
    assert all(taken[device] <= room[device] for device in room)
    assert len([name for name in devices if name.startswith("model.layers.")]) == len(layers)


def test_tied_weights_stay_on_one_device(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_gpt2(tmp_path / "gpt2"))
    devices = spread(model, {0: size(model), 1: size(model)})
    assert set(devices.values()) == {0, 1}
    assert devices["lm_head"] == devices["transformer.wte"]


def test_too_little_memory_is_reported_before_a_move(llama: Any) -> None:
    with pytest.raises(WeightsError, match="no room on the devices for all of the model"):
        spread(llama, {0: size(llama) // 4, 1: size(llama) // 4})


def test_model_stays_on_cpu_without_gpu(llama: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    place(llama, ModelSpec("m", "0.8"), PretendDriver(tmp_path))
    assert {tensor.device.type for tensor in llama.parameters()} == {"cpu"}


def test_moved_weights_keep_values_and_ties(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_gpt2(tmp_path / "gpt2"))
    before = {name: tensor.clone() for name, tensor in collect(model).items()}
    places = {tensor.data_ptr() for tensor in collect(model).values()}
    devices = {"": "cpu", "transformer.h.0": torch.device("cpu")}
    move(model, devices, PretendDriver(tmp_path))
    after = collect(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not places & {tensor.data_ptr() for tensor in after.values() if tensor.numel()}
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.lm_head.weight, torch.nn.Parameter)


def test_owner_and_runner_shares_include_allocator_overhead() -> None:
    assert owner_shares(None) == runner_shares(None, {}) == {}
    ((device, owner),) = owner_shares({3: 10 * GIB}).items()
    assert device == 3
    # There is room for torch's allocation granularity, even with the smallest model.
    assert 10 * GIB + (200 << 20) < owner < 11 * GIB
    runner = runner_shares({3: 10 * GIB}, {3: 8 * GIB})[3]
    assert 2 * GIB + (200 << 20) < runner < 3 * GIB
    assert 200 << 20 < runner_shares({3: 1}, {3: 8 * GIB})[3] < GIB
