"""Hostile repositories: their gain from the loading process, and the errors for their users."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight import TransformersModel
from transformers import dynamic_module_utils

from ndif.config.settings import Settings
from ndif.host.model_process import ModelProcessError
from ndif.host.port import ReplicaLostError
from ndif.host.shared_weights import SharedWeights
from ndif.runtime.spec import ModelSpec
from ndif.runtime.weights import loading
from tests.on_loop import on_loop
from tests.runtime.apart import apart
from tests.runtime.replica import expected, reading, serve
from tests.security.repositories import (
    ATTACKS,
    Lab,
    adapter_of_a_folder,
    code_of_its_own,
    layer_without_weights,
    link_to_weights,
    pickled,
    without_a_class,
)

pytestmark = [pytest.mark.process, pytest.mark.slow]

CELLS = [(name, cell) for name, attack in ATTACKS.items() for cell in ("none", *attack.by, "all")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    outcome_by_attack: dict[str, dict[str, Any]] = apart(
        "tests.security.repositories", tmp_path_factory.mktemp("attacks")
    )
    return outcome_by_attack


@pytest.mark.parametrize(("name", "cell"), CELLS)
def test_each_layer_alone_stops_hostile_repository(
    outcomes: dict[str, dict[str, Any]], name: str, cell: str
) -> None:
    outcome = outcomes[name][cell]
    assert outcome.get("gained") is (cell == "none"), (ATTACKS[name].aim, outcome)


def test_trusted_repository_code_still_runs(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["trusted code"]["all"]["loaded"], outcomes["trusted code"]["all"]


def test_operators_module_is_importable_in_confined_process(
    outcomes: dict[str, dict[str, Any]],
) -> None:
    assert outcomes["modules"]["all"] == {"answer": 42}


# The server's answers


@pytest.fixture
def lab(tiny_gpt2: Path, tmp_path: Path) -> Lab:
    private = shutil.copytree(tiny_gpt2, tmp_path / "private")
    weight = torch.empty(0)
    return Lab(tmp_path, tiny_gpt2, private, weight, tmp_path / "secret", tmp_path / "marker", 1)


def strangers(folder: Path, **given: Any) -> Settings:
    return Settings(protector="off", session_root=folder / "session", **given)


REFUSED: dict[str, tuple[Callable[[Lab], Path], str]] = {
    "an adapter in the place of a model": (adapter_of_a_folder, "config.json"),
    "a link": (link_to_weights, "model.safetensors"),
    "pickles that are not allowed": (pickled, "NDIF_ALLOW_PICKLED_WEIGHTS"),
    "code that is not trusted": (without_a_class, "deploy it with trust_remote_code"),
    "a config of a larger model": (layer_without_weights, "GiB of memory"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_loop
async def test_hostile_repository_is_refused_in_one_line(lab: Lab, name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ModelProcessError) as refused:
        async with serve(make(lab), settings=strangers(lab.folder)):
            pass
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_linked_weights_are_loaded_and_adapter_beside_them_is_ignored(
    lab: Lab, trusted: bool
) -> None:
    folder = shutil.copytree(lab.own, lab.folder / "model")
    weights = (folder / "model.safetensors").rename(lab.folder / "on-another-disk")
    (folder / "model.safetensors").symlink_to(weights)
    (folder / "circle").symlink_to("circle")
    given = {"base_model_name_or_path": str(lab.private), "peft_type": "LORA", "r": 1}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    client = TransformersModel(str(lab.own), task="text-generation")
    settings = None if trusted else strangers(lab.folder)
    async with serve(folder, settings=settings) as served:
        logits = await served.logits(reading(client), trusted=trusted)
    assert torch.equal(logits, expected(lab.own))


@pytest.mark.parametrize("trusted", [True, False])
@on_loop
async def test_pickled_weights_are_loaded_if_allowed(lab: Lab, trusted: bool) -> None:
    client = TransformersModel(str(lab.own), task="text-generation")
    allowing = strangers(lab.folder, allow_pickled_weights=True)
    async with serve(pickled(lab), settings=allowing) as served:
        logits = await served.logits(reading(client), trusted=False)
    assert torch.equal(logits, expected(lab.own))


@on_loop
async def test_untrusted_repository_code_is_ignored_if_class_is_known(lab: Lab) -> None:
    async with serve(code_of_its_own(lab), settings=strangers(lab.folder)) as served:
        assert served.actor.model.class_name == "GPT2LMHeadModel"


@on_loop
async def test_model_process_is_confined_unless_a_user_is_trusted(lab: Lab) -> None:
    keys = lab.folder / "keys.yaml"
    keys.write_text("keys: [{key: a-long-key}]")
    settings = strangers(lab.folder, api_keys=keys)
    client = TransformersModel(str(lab.own), task="text-generation")

    def status(pid: int) -> dict[str, str]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}

    async with serve(lab.own, settings=settings) as served:
        state = status(served.zygote)
        assert (state["Seccomp"], state["NoNewPrivs"]) == ("2", "1")
        await served.logits(reading(client), trusted=False)
        # A user who became trusted later causes the model to be loaded again.
        keys.write_text("keys: [{key: a-long-key, tags: [trusted]}]")
        with pytest.raises(ReplicaLostError):
            await served.run(reading(client), trusted=True)
    async with serve(lab.own, settings=settings) as served:
        assert status(served.zygote)["Seccomp"] == "0"
        for trusted in (False, True):
            logits = await served.logits(reading(client), trusted=trusted)
            assert torch.equal(logits, expected(lab.own))


def test_process_uses_one_repository_code_folder_and_removes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", "")
    spec = ModelSpec("org/model", "0.8", trust_remote_code=True)
    [folder] = loading.folders_of_code(spec)
    assert loading.folders_of_code(spec) == [folder]
    assert str(folder) == dynamic_module_utils.HF_MODULES_CACHE
    loading.remove_code()
    assert not folder.exists()


def test_processes_of_different_models_do_not_share_weight_memory() -> None:
    """A process that names another model's weights gets separate memory."""
    weights = SharedWeights()

    async def run() -> None:
        first = await weights.of("first", "/models/a:1:2", 4096)
        second = await weights.of("second", "/models/b:1:2", 4096)
        assert None not in (first, second)
        assert first != second
        weights.leave("first")
        weights.leave("second")

    asyncio.run(run())
