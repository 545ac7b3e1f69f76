"""Payloads of real clients of every generation, run by its adapter under a Protector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_rwkv
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

BLOCKS = Path(__file__).with_name("blocks.py")


@pytest.fixture(scope="module")
def tiny_rwkv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rwkv(tmp_path_factory.mktemp("rwkv"))


@pytest.fixture(scope="module", params=["0.8", "0.7", "0.6"])
def results(
    request: pytest.FixtureRequest, tiny_gpt2: Path, tiny_rwkv: Path, runtimes: Path
) -> tuple[str, dict[str, Any]]:
    generation: str = request.param
    path = [] if generation == "0.8" else [str(runtimes / generation)]
    inherited = os.environ.get("PYTHONPATH")
    ran = subprocess.run(
        [sys.executable, BLOCKS, generation, tiny_gpt2, tiny_rwkv],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])]),
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr
    content: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return generation, content


def test_harmless_blocks_return_same_values_with_policy(
    results: tuple[str, dict[str, Any]],
) -> None:
    _, values = results
    for name in ("reads", "calls"):
        assert values[name] == values[f"{name} unguarded"]
    assert len(values["reads"]["found"]) == 4
    assert values["calls"]["found"] is True


def test_weights_are_copies_and_tokenizer_is_usable(results: tuple[str, dict[str, Any]]) -> None:
    _, values = results
    assert values["weights"] == {"total": [True, True], "words": [True, 4]}


def test_generate_loop_runs_under_policy(results: tuple[str, dict[str, Any]]) -> None:
    _, values = results
    assert values["generates"]["found"] == [True, True]


def test_module_named_output_is_readable(results: tuple[str, dict[str, Any]]) -> None:
    """nnsight 0.6 and 0.7 send a special class for such a module."""
    generation, values = results
    if generation != "0.8":
        for way in ("", " unguarded"):
            assert values[f"part called output{way}"]["found"] == [3, True]


def test_eager_deployment_returns_attention_weights(results: tuple[str, dict[str, Any]]) -> None:
    _, values = results
    assert values["attends"]["found"] == [4, True]


def test_client_only_module_is_accepted_if_unused_and_reported_if_used(
    results: tuple[str, dict[str, Any]],
) -> None:
    """Clients of 0.6 and 0.7 refer to the attached module in every request, used or not."""
    generation, values = results
    for way in ("", " unguarded"):
        assert values[f"has_an_attachment{way}"]["found"][0] == 1
        if generation != "0.8":
            called, read = values[f"calls_an_attachment{way}"], values["reads_an_attachment"]
            assert "h[0].attachment(model" in called
            for text in (called, read):
                assert "transformer.h.0.attachment, which the model here does not have" in text
                assert text.count("attached to it?") == 1


NOT = "is not available on this server"

REFUSED = {
    "imports": ("ImportError: module 'os' is not available on this server; you can import", "os.getcwd()"),
    "walks": ("AttributeError: the attribute '_module' of ", "model._module.__class__"),
    "walks_in_an_invoke": (f"AttributeError: torch.save {NOT}: it writes files", "torch.save"),
    "steals": (f".interleaver {NOT}: it is internal to nnsight", "model.interleaver"),
    "indexes": ("AttributeError: the attribute '_module' of ", "model["),
    "indexes_by_a_method": (f".interleaver {NOT}", "__getitem__(model, "),
    "indexes_by_an_operator": (f".interleaver {NOT}", "operator.getitem("),
    "moves": (f"Envoy.to {NOT}: it moves the model", "model.transformer.to("),
    "hooks": (f"Envoy.register_forward_hook {NOT}: it changes the model", "register_forward_hook"),
    "assigns": ("AttributeError: cannot set 'weight' of 'Envoy': it is protected", "weight = 1"),
    "configures": ("AttributeError: cannot set 'n_layer' of ", "n_layer = 1"),
    "tokenizes": (f".save_pretrained {NOT}: it writes files", "save_pretrained"),
    "pads": ("set it on your side, and trace your tokenizer's output", "padding_side = "),
    "calls_what_walks": ("AttributeError: the attribute '__class__' is not", "return value.__class__"),
    "binds": ("SyntaxError: the name '__builtins__' cannot be bound on this server", "__builtins__ = {}"),
    "instruments": ("TypeError: .source is available on this server for functions of the model", ".source"),
    "forges": ("AttributeError: the attribute '_module' of 'Forged' is private", "Forged().format(1)"),
    "names_a_method": (f"the model's method 'save_pretrained' {NOT}", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_forbidden_use_is_refused_at_users_line(
    results: tuple[str, dict[str, Any]], name: str
) -> None:
    _, values = results
    message, line = REFUSED[name]
    text = values[name]
    assert isinstance(text, str), text
    assert message in text.splitlines()[-1], text
    assert line in text, text
    if name not in ("names_a_method", "binds"):
        assert f'{BLOCKS}", line ' in text, text
        assert "protector/guards.py" not in text, text


def test_module_path_with_forbidden_attribute_is_refused(
    results: tuple[str, dict[str, Any]],
) -> None:
    generation, values = results
    if generation == "0.8":  # which wraps the module without following its path
        assert values["follows_a_path"] == {"found": "Envoy"}
    else:
        assert "the attribute '__globals__' is not available" in values["follows_a_path"]
