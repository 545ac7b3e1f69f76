"""The task of a model, and default settings of a deployment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ndif.config.settings import Settings
from ndif.schema.deployment import Defaults, DeploymentConfig, read_task, task_of

TASKS = {
    # A card that names no task, another one, or one that transformers does not have
    ("LlamaForCausalLM", None): "text-generation",
    ("LlamaForCausalLM", "feature-extraction"): "text-generation",
    ("Qwen3ForCausalLM", "text-ranking"): "text-generation",
    ("GPT2LMHeadModel", "text-generation"): "text-generation",
    ("BertForMaskedLM", "sentence-similarity"): "fill-mask",
    ("BertForSequenceClassification", "text-ranking"): "text-classification",
    ("BertModel", "sentence-similarity"): "feature-extraction",
    ("BertModel", "text-generation"): "feature-extraction",
    # An architecture that has several
    ("BartForSequenceClassification", "zero-shot-classification"): "zero-shot-classification",
    ("LlavaForConditionalGeneration", "image-text-to-text"): "image-text-to-text",
    ("WhisperForConditionalGeneration", "automatic-speech-recognition"): (
        "automatic-speech-recognition"
    ),
    ("T5ForConditionalGeneration", "translation"): "text-generation",
    ("T5ForConditionalGeneration", None): "text-generation",
    ("CLIPModel", "zero-shot-image-classification"): "zero-shot-image-classification",
    ("DetrForObjectDetection", "object-detection"): "object-detection",
}


@pytest.mark.parametrize(("named", "task"), TASKS.items(), ids=lambda value: str(value))
def test_architecture_decides_task(
    named: tuple[str, str | None], task: str, tmp_path: Path
) -> None:
    architecture, card = named
    assert task_of([architecture], card) == task
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert read_task(tmp_path / "config.json", card) == task


@pytest.mark.parametrize(
    "text", ["{}", '{"architectures": null}', '{"architectures": 3}', "no JSON"]
)
def test_task_of_card_is_used_if_config_names_no_architecture(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_task(tmp_path / "config.json") is None
    assert read_task(tmp_path / "config.json", "fill-mask") == "fill-mask"


def test_task_of_card_is_used_if_config_is_missing(tmp_path: Path) -> None:
    assert read_task(tmp_path / "config.json", "fill-mask") == "fill-mask"


def test_unset_deployment_settings_use_server_defaults() -> None:
    plain = DeploymentConfig("a/b", "a/b")
    given = replace(plain, dtype="float32", padding_factor=0.0, padding_bytes=1, size_bytes=200)
    assert (Defaults().dtype_of(plain), Defaults().padded(100, plain)) == ("auto", 115)
    defaults = Defaults("bfloat16", 0.5, 7)
    assert (defaults.dtype_of(plain), defaults.padded(100, plain)) == ("bfloat16", 157)
    assert (defaults.dtype_of(given), defaults.padded(100, given)) == ("float32", 201)
    variables = Settings(
        default_dtype="bfloat16", default_padding_factor=0.5, default_padding_bytes=7
    )
    assert Defaults.of(variables) == defaults
