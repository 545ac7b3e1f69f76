"""The CUDA driver's choices, reads and writes that can be tested without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from ndif.runtime.process import cuda
from ndif.runtime.process.cuda import (
    Cuda,
    allocator_settings,
    gpu_minors,
    visible_devices,
    without_event,
)
from ndif.runtime.spec import ModelSpec

pytestmark = pytest.mark.process

GIB = 1 << 30


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, named by UUID, and none of the variables that a driver sets."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setattr("torch.cuda._cached_device_count", None)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", fail)


def model(device: str | None = None, memory: dict[int, int] | None = None) -> ModelSpec:
    return ModelSpec("gpt2", "0.8", device=device, max_memory=memory)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("spec", "visible", "selected"),
    [
        (model("cuda"), "GPU-a", model("cuda:0")),
        (model("cuda:1"), "GPU-b", model("cuda:0")),
        (model("cuda:1", {0: 1, 1: 2}), "GPU-b", model("cuda:0", {0: 2})),
        (model("auto"), "GPU-a,GPU-b", model("auto")),
        (model(), "GPU-a,GPU-b", model("auto")),
        (model(None, {1: GIB}), "GPU-b", model("auto", {0: GIB})),
        (model("auto", {1: 2, 0: 1}), "GPU-a,GPU-b", model("auto", {0: 1, 1: 2})),
    ],
    ids=str,
)
def test_model_sees_only_its_devices(spec: ModelSpec, visible: str, selected: ModelSpec) -> None:
    driver = Cuda()
    assert driver.uses_devices(spec)
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert driver.select(spec) == selected
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert torch.cuda._cached_device_count == visible.count(",") + 1


@pytest.mark.usefixtures("two_gpus")
def test_node_device_is_node_index_after_reselection() -> None:
    driver = Cuda()
    assert driver.uses_devices(model(None, {0: GIB}))
    for index, name in ((0, "GPU-a"), (1, "GPU-b"), (0, "GPU-a")):
        driver.select(model(None, {index: GIB}))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == name
        assert driver.node_device("cuda:0") == f"cuda:{index}"
    assert driver.node_device("cpu") == "cpu"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_model_on_cpu_or_mps_sees_no_gpu(device: str) -> None:
    assert not Cuda().uses_devices(model(device))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("device", ["auto", None])
def test_auto_device_uses_no_gpu_if_cuda_is_broken(device: str | None) -> None:
    assert not Cuda().uses_devices(model(device))


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("spec", "where"), [(model("cuda:1"), "cuda:1"), (model(None, {1: GIB}), "GPU 1")], ids=str
)
def test_missing_required_gpu_is_an_error(spec: ModelSpec, where: str) -> None:
    with pytest.raises(ValueError, match=rf"to be on {where}, but .* no CUDA device"):
        Cuda().uses_devices(spec)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("spec", [model(None, {0: GIB, 2: GIB}), model("cuda:2")], ids=str)
def test_gpu_index_beyond_device_count_is_an_error(spec: ModelSpec) -> None:
    with pytest.raises(ValueError, match="on GPU 2, but torch finds 2 CUDA devices here"):
        Cuda().uses_devices(spec)


def test_visible_devices_default_to_indices() -> None:
    assert visible_devices(None, [0, 2]) == "0,2"
    assert visible_devices("3, GPU-x ,5", [1, 2]) == "GPU-x,5"


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:False"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments: True"},
            "max_split_size_mb:128,expandable_segments: False",
        ),
    ],
)
def test_allocator_settings_disable_expandable_segments(
    environment: dict[str, str], settings: str | None
) -> None:
    assert allocator_settings(environment) == settings


def test_torch_accepts_allocator_settings_without_starting_cuda() -> None:
    cuda._set_allocator("max_split_size_mb:128,expandable_segments:False")
    assert not torch.cuda.is_initialized()


def test_exported_handle_has_no_event_sync() -> None:
    names = rebuild_cuda_tensor.__code__.co_varnames[: rebuild_cuda_tensor.__code__.co_argcount]
    arguments = tuple(True if name == "event_sync_required" else name for name in names)
    function, without = without_event((rebuild_cuda_tensor, arguments))
    assert function is rebuild_cuda_tensor
    assert without[-1] is False
    assert without[:-1] == arguments[:-1]


# In the format of drivers 535 and 570 (public reports; the UUIDs are changed).
INFORMATION = {
    "0000:70:00.0": "Model: \t\t NVIDIA L4\nIRQ:   \t\t 16\nGPU UUID: \t GPU-aaaa\n"
    "Bus Location: \t 0000:70:00.0\nDevice Minor: \t 0\nGPU Excluded:\t No\n",
    "0000:b1:00.0": "Model: \t\t NVIDIA L4\nIRQ:   \t\t 17\nGPU UUID: \t GPU-bbbb\n"
    "Bus Location: \t 0000:b1:00.0\nDevice Minor: \t 3\nGPU Excluded:\t No\n",
}


def test_gpu_minors_are_found_by_bus_or_uuid() -> None:
    assert gpu_minors(INFORMATION, [("0000:b1:00.0", "")]) == {3}
    assert gpu_minors(INFORMATION, [("", "aaaa"), ("", "bbbb")]) == {0, 3}
    assert gpu_minors(INFORMATION, [("0000:b1:00.0", ""), ("0000:00:00.0", "cccc")]) is None
    assert gpu_minors({}, [("", "")]) is None


@pytest.mark.parametrize(
    ("node", "minors", "ours"),
    [
        ("/dev/nvidia3", frozenset({3}), True),
        ("/dev/nvidia0", frozenset({3}), False),
        ("/dev/nvidia33", frozenset({3}), False),
        ("/dev/nvidia0", None, True),
        ("/dev/nvidiactl", frozenset({3}), True),
        ("/dev/nvidia-uvm", frozenset({3}), True),
        ("/dev/nvidia-caps/nvidia-cap12", frozenset({3}), True),
    ],
)
def test_only_device_files_of_replicas_gpus_are_ours(
    node: str, minors: frozenset[int] | None, ours: bool
) -> None:
    assert cuda._is_selected(node, minors) is ours


def test_early_start_of_cuda_is_detected_with_suspect_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Cuda().find_early_start() is None
    maps = "7f0-7f1 r-xp 0 0 0 /v/lib/site-packages/{}\n"
    libraries = ("bitsandbytes/libbitsandbytes_cuda128.so", "torch/lib/libtorch_cuda.so")
    monkeypatch.setattr(cuda, "_open_nodes", lambda: {"/dev/nvidiactl"})
    monkeypatch.setattr(
        Path, "read_text", lambda _: "".join(maps.format(library) for library in libraries)
    )
    reason = Cuda().find_early_start()
    assert reason is not None
    assert reason.endswith("(imported packages that may do so: bitsandbytes)")
