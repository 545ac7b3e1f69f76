"""Effects of a request on a GPU that must not affect the next request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nnsight import TransformersModel

from ndif.config.settings import Settings
from ndif.host.model_actor import ReplicaDevices
from ndif.host.runner_handle import RunnerHandle
from ndif.schema.status import Status
from tests.gpu.blocks import (
    generating,
    gradients,
    indexing_outside,
    never_ending,
    outliving_its_request,
    reporting_settings,
    writing_natively,
    writing_to_its_end,
)
from tests.gpu.conftest import Place, needs_a_gpu
from tests.gpu.devices import GIB
from tests.on_loop import on_loop
from tests.runtime.replica import expected, reading, serve
from tests.waiting import time_passes_async

pytestmark = pytest.mark.process

SLOW_S = 3.0
"""Seconds that a driver may take to end a process; longer than the host waits for a live runner."""

anyone = pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])


@pytest.fixture(scope="module")
def truth(tiny_gpt2: Path) -> torch.Tensor:
    return expected(tiny_gpt2)


def check(place: Place, model: TransformersModel, truth: torch.Tensor) -> None:
    """Check that the model computes the right values, for trusted and untrusted requests."""
    read = reading(model)
    for trusted in (False, True):
        logits = place.run(place.served.logits(read, trusted=trusted))
        torch.testing.assert_close(logits.cpu(), truth, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("block", [reading, generating, gradients])
def test_sandboxed_and_trusted_values_are_bitwise_equal(
    place: Place, model: TransformersModel, block: Callable[[TransformersModel], bytes]
) -> None:
    payload = block(model)
    trusted, again, sandboxed = (
        place.run(place.served.logits(payload, trusted=kind)) for kind in (True, True, False)
    )
    if place.device == "cuda" and not torch.equal(trusted, again):
        pytest.skip("the card's own bits differ from run to run")
    assert torch.equal(trusted, sandboxed)


@anyone
def test_device_assertion_fails_only_its_request(
    place: Place, model: TransformersModel, truth: torch.Tensor, trusted: bool
) -> None:
    response = place.run(place.served.run(indexing_outside(model), trusted=trusted))
    assert response.status is Status.ERROR
    message = "device-side assert" if place.device == "cuda" else "out of bounds"
    assert message in response.description
    check(place, model, truth)


def test_natively_overwritten_weights_are_restored(
    place: Place, model: TransformersModel, truth: torch.Tensor
) -> None:
    assert not place.run(place.served.logits(writing_natively(model), trusted=False)).any()
    check(place, model, truth)


def test_weights_are_restored_after_killing_runner_that_overwrites_them(
    place: Place, model: TransformersModel, truth: torch.Tensor
) -> None:
    with place.limited():
        response = place.run(place.served.run(writing_to_its_end(model), trusted=False))
    assert response.status is Status.ERROR
    assert f"longer than {place.timeout_s:g}s" in response.description
    check(place, model, truth)


def test_next_request_sees_right_weights_while_killed_runner_dies_slowly(
    place: Place, model: TransformersModel, truth: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = RunnerHandle.kill

    def slowly(runner: RunnerHandle) -> None:
        asyncio.get_running_loop().call_later(SLOW_S, at_once, runner)

    monkeypatch.setattr(RunnerHandle, "kill", slowly)
    place.run(place.served.run(outliving_its_request(model), trusted=False))
    read = reading(model)
    try:
        logits = place.run(place.served.logits(read, trusted=False))
        torch.testing.assert_close(logits.cpu(), truth, rtol=1e-3, atol=1e-4)
    finally:
        place.run(time_passes_async(SLOW_S))


@anyone
def test_endless_request_times_out(
    place: Place, model: TransformersModel, truth: torch.Tensor, trusted: bool
) -> None:
    with place.limited():
        response = place.run(place.served.run(never_ending(model), trusted=trusted))
    assert response.status is Status.ERROR
    assert f"longer than {place.timeout_s:g}s" in response.description
    check(place, model, truth)


def card() -> str:
    """Return the UUID of the second GPU, or of the only one."""
    last = min(torch.cuda.device_count(), 2) - 1
    return f"GPU-{torch.cuda.get_device_properties(last).uuid}"


ROUNDING = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@pytest.mark.parametrize(
    ("device", "variables"),
    [
        pytest.param("cpu", ROUNDING, id="cpu-rounding"),
        pytest.param("cuda", ROUNDING, id="cuda-rounding", marks=needs_a_gpu),
        pytest.param(
            "cuda",
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "the card"},
            id="cuda-uuid",
            marks=needs_a_gpu,
        ),
        pytest.param(
            "cuda",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            id="cuda-expandable",
            marks=needs_a_gpu,
        ),
    ],
)
@on_loop
async def test_environment_variables_apply_to_trusted_and_sandboxed_runners(
    device: str,
    variables: dict[str, str],
    tiny_gpt2: Path,
    model: TransformersModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uuid = card() if device == "cuda" and "CUDA_VISIBLE_DEVICES" in variables else ""
    for name, value in variables.items():
        monkeypatch.setenv(name, uuid if value == "the card" else value)
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{key: of-a-colleague, tags: [trusted]}]")
    settings = Settings(session_root=tmp_path, protector="off", api_keys=keys)
    devices = ReplicaDevices({0: 2 * GIB} if device == "cuda" else {})
    payload = reporting_settings(model)
    async with serve(tiny_gpt2, settings=settings, devices=devices) as served:
        trusted = await served.saves(payload, trusted=True)
        sandboxed = await served.saves(payload, trusted=False)
    assert trusted["settings"] == sandboxed["settings"]
    assert torch.equal(trusted["product"], sandboxed["product"])
    assert trusted["settings"]["tf32"] is ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in variables)
    assert uuid.endswith(trusted["settings"]["card"]) or not uuid
