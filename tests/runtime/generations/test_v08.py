"""Attention implementation of an nnsight 0.8 model: the deployment's setting and the request's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndif.runtime.generations import PayloadError
from ndif.runtime.generations.v08 import Nnsight08
from ndif.runtime.spec import ModelSpec
from tests.tiny_models import make_gemma2


def loaded(folder: Path, attention: str | None = None) -> Nnsight08:
    generation = Nnsight08()
    generation.load(
        ModelSpec(str(folder), "0.8", task="text-generation", attn_implementation=attention)
    )
    return generation


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Nnsight08:
    return loaded(make_gemma2(tmp_path_factory.mktemp("gemma2")))


def test_a_model_without_the_clients_attention_keeps_its_own(
    gemma2: Nnsight08, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not gemma2.prepare({"attn_implementation": "sdpa"})
    assert gemma2.model.attn_implementation == "eager"
    [line] = capsys.readouterr().out.splitlines()
    assert line == (
        "The attention is 'eager' here, not 'sdpa' as your client has it: the server's transformers has "
        "no 'sdpa' for Gemma2ForCausalLM."
    )
    assert not gemma2.prepare({"attn_implementation": "eager"})
    assert not gemma2.prepare({})
    assert capsys.readouterr().out == ""


def test_unknown_attention_implementation_is_refused(gemma2: Nnsight08) -> None:
    with pytest.raises(PayloadError, match="eagre"):
        gemma2.prepare({"attn_implementation": "eagre"})


def test_request_without_attention_gets_deployments_attention(
    tiny_gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generation = loaded(tiny_gpt2, "eager")
    assert not generation.prepare({})
    assert generation.model.attn_implementation == "eager"
    # Requests of nnsight 0.8.1 name an attention implementation.
    assert generation.prepare({"attn_implementation": "sdpa"})
    assert generation.model.attn_implementation == "sdpa"
    assert generation.prepare({"attn_implementation": None})
    assert generation.model.attn_implementation == "eager"
    assert capsys.readouterr().out == ""
