"""Which parts of a model go to which GPUs, worked out where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ndif.runtime.generations.loading import load_arguments, on_cuda
from ndif.runtime.memory import part_of
from ndif.runtime.placing import place, spread
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights import WeightsError
from tests.tiny_models import make_gpt2, make_llama

GIB = 1 << 30


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_llama(tmp_path_factory.mktemp("models") / "llama")
    return AutoModelForCausalLM.from_pretrained(folder)


def size(module: Any) -> int:
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda._cached_device_count", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")


class TestWhatIsAskedFor:
    """Of transformers, by the memory that was given."""

    def test_one_gpu(self) -> None:
        spec = ModelSpec("m", "0.8", device="auto", max_memory={3: GIB})
        assert load_arguments(spec) == {"dtype": "auto", "device_map": "cuda:3"}

    def test_several(self) -> None:
        spec = ModelSpec("m", "0.8", device="auto", max_memory={1: GIB, 2: 2 * GIB})
        assert load_arguments(spec) == {
            "dtype": "auto",
            "device_map": "auto",
            "max_memory": {1: GIB, 2: 2 * GIB},
        }

    @pytest.mark.usefixtures("two_gpus")
    def test_no_device_is_named(self) -> None:
        spec = ModelSpec("m", "0.8", max_memory={1: GIB})
        assert load_arguments(spec)["device_map"] == "cuda:1"

    @pytest.mark.parametrize("device", ["cpu", "meta", "cuda:0"])
    def test_a_device_that_is_named_goes_first(self, device: str) -> None:
        spec = ModelSpec("m", "0.8", device=device, max_memory={1: GIB, 2: GIB})
        expected = {} if device == "cpu" else {"device_map": device}
        assert load_arguments(spec) == {"dtype": "auto", **expected}

    def test_it_survives_a_frame(self) -> None:
        spec = ModelSpec("m", "0.8", max_memory={0: GIB, 10: 7}, trust_remote_code=True)
        assert ModelSpec.of(json.loads(json.dumps(spec.header()))) == spec


class TestWhatIsNotThere:
    """A GPU that is given but is not there is said by its number."""

    @pytest.mark.usefixtures("two_gpus")
    def test_a_gpu_too_many(self) -> None:
        with pytest.raises(ValueError, match="on GPU 2, but torch finds 2 CUDA devices here"):
            on_cuda(ModelSpec("m", "0.8", max_memory={0: GIB, 2: GIB}))

    @pytest.mark.usefixtures("two_gpus")
    def test_those_that_are_there(self) -> None:
        assert on_cuda(ModelSpec("m", "0.8", max_memory={0: GIB, 1: GIB}))

    def test_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.backends.cuda.is_built", lambda: False)
        with pytest.raises(ValueError, match=r"on GPU 1, but .* no CUDA device"):
            on_cuda(ModelSpec("m", "0.8", max_memory={1: GIB}))


def test_a_model_is_spread_over_what_it_may_take(llama: Any) -> None:
    room = {1: size(llama), 3: size(llama)}
    found = spread(llama, room)
    assert set(found.values()) == {1, 3}
    layers = llama.model.layers
    taken = dict.fromkeys(room, 0)
    for name, device in found.items():
        taken[device] += size(llama.get_submodule(name))
        assert not name.startswith("model.layers.") or name.count(".") == 2, "a layer was split"
    assert all(taken[device] <= room[device] for device in room)
    assert len([name for name in found if name.startswith("model.layers.")]) == len(layers)


def test_what_is_tied_stays_together(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_gpt2(tmp_path / "gpt2"))
    found = spread(model, {0: size(model), 1: size(model)})
    assert set(found.values()) == {0, 1}
    assert found["lm_head"] == found["transformer.wte"]


def test_too_little_room_is_said_before_anything_moves(llama: Any) -> None:
    with pytest.raises(WeightsError, match="no room on the devices for all of the model"):
        spread(llama, {0: size(llama) // 4, 1: size(llama) // 4})


def test_where_there_is_no_gpu_nothing_moves(llama: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    place(llama, ModelSpec("m", "0.8"))
    assert {tensor.device.type for tensor in llama.parameters()} == {"cpu"}


def test_the_part_of_a_gpu() -> None:
    assert part_of(80 * GIB, 80 * GIB) is None
    assert part_of(80 * GIB, 200 * GIB) is None
    half = part_of(80 * GIB, 40 * GIB)
    assert half is not None
    assert 0.5 < half < 0.51
    least = part_of(80 * GIB, 1)
    assert least is not None
    # What torch takes by the piece must have room beside the smallest model.
    assert least * 80 * GIB > 200 << 20
