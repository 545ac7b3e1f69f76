"""The task of a model: its architecture's, chosen by its card where the architecture has several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ndif.schema.deployment import read_task, task_of

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
def test_the_architecture_decides(named: tuple[str, str | None], task: str, tmp_path: Path) -> None:
    architecture, card = named
    assert task_of([architecture], card) == task
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert read_task(tmp_path / "config.json", card) == task


@pytest.mark.parametrize(
    "text", ["{}", '{"architectures": null}', '{"architectures": 3}', "no JSON"]
)
def test_a_config_that_names_none_leaves_it_to_the_card(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_task(tmp_path / "config.json") is None
    assert read_task(tmp_path / "config.json", "fill-mask") == "fill-mask"


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert read_task(tmp_path / "config.json", "fill-mask") == "fill-mask"
