"""`ndif model`: the printed tree, an example trace, and names that are hostile to a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

from ndif.cluster.models import Models
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.structure import ModelStructure, ModuleNode
from tests.cli.test_commands import error, invoke, printed
from tests.gateway.test_model_pages import BERT, GPT2, application, structures
from tests.serving import serving

pytestmark = pytest.mark.process

__all__ = ["structures"]

HOSTILE = "[red]\x1b[2J\u202e<img src=x onerror=alert(1)>"
Ndif = Callable[..., click.testing.Result]


@pytest.fixture
def ndif(
    structures: dict[str, ModelStructure],
    runtimes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Ndif]:
    """The command with the address of a server with known models, one with hostile names."""
    monkeypatch.setenv("NDIF_SESSION_ROOT", str(tmp_path / "sessions"))
    monkeypatch.setenv("COLUMNS", "200")
    names = {GPT2: "text-generation", BERT: "fill-mask", "org/new": None, "org/evil": None}
    models = Models([DeploymentConfig(name, name, task=task) for name, task in names.items()])
    for model in models:
        name = model.config.repo_id
        if name in structures:
            model.structures["0.8"], model.load_s["0.8"] = structures[name], 75.0
        elif name == "org/evil":
            below = ModuleNode(name=HOSTILE, class_name=HOSTILE, parameters=[], count=0)
            tree = ModuleNode(name="", class_name="A", parameters=[], count=1, children=[below])
            model.structures["0.8"] = structures[GPT2].model_copy(update={"tree": tree})
    with serving(application(models, runtimes)) as url:
        yield lambda *arguments: invoke("model", *arguments, "--url", url)


def test_model_tree_has_one_line_per_structure(ndif: Ndif) -> None:
    result = ndif(GPT2)
    assert result.exit_code == 0, result.output
    lines = [line.strip(" │├└─") for line in result.stdout.splitlines()]
    assert lines[0] == f"{GPT2}: text-generation, RUNNING"
    facts = r"hidden size 64, layers 4, heads 4, vocabulary \d+, context 256"
    assert any(re.fullmatch(facts, line) for line in lines), lines
    assert any(line.startswith("nnsight 0.8 (RUNNING, loaded in 1m 15s), 0.7") for line in lines)
    assert "Modules, as nnsight 0.8 names them:" in lines
    (blocks,) = (line for line in lines if " alike: " in line)
    assert blocks.startswith("model.transformer.h[0] … 4 alike: 0-3  GPT2Block  ")
    (norm,) = (line for line in lines if line.startswith("model.transformer.ln_f "))
    assert norm == "model.transformer.ln_f  LayerNorm  128  weight 64, bias 64"


def test_model_tree_shows_renamed_module(ndif: Ndif) -> None:
    moved = ndif(BERT).stdout
    assert "model.bert.encoder.layer[0].E_output  BertOutput" in moved
    assert "nns_output" not in moved


def test_trace_option_prints_only_trace(ndif: Ndif) -> None:
    for arguments in ([], ["--generation", "0.7"]):
        result = ndif(GPT2, "--trace", *arguments)
        assert result.exit_code == 0, result.output
        compile(result.stdout, "pasted.py", "exec")
    assert (
        "no example trace of org/bert for nnsight 0.7. There are examples for nnsight 0.8."
        in error(ndif(BERT, "--trace", "--generation", "0.7"), 1)
    )
    assert "There is no example trace of org/new." in error(ndif("org/new", "--trace"), 1)


def test_json_output_contains_module_tree(ndif: Ndif) -> None:
    answer: dict[str, Any] = printed(ndif(GPT2, "--json"))
    assert answer["tree"]["class"] == "GPT2LMHeadModel"


def test_unmeasured_and_unknown_models_have_message(ndif: Ndif) -> None:
    assert "unknown until the model is measured or loaded" in ndif("org/new").stdout
    assert "does not know 'org/none'" in error(ndif("org/none"), 4)


def test_hostile_names_are_printed_without_control_characters(ndif: Ndif) -> None:
    shown = ndif("org/evil").stdout
    assert "[red]" in shown
    assert "<img src=x onerror=alert(1)>" in shown
    assert not {"\x1b", "\u202e"} & set(shown)
