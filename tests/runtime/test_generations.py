"""Facts about a model that its host may publish."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndif.runtime.generations import _read_config


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (
            '{"n_embd": 64, "eps": 1e-05, "names": ["é"]}',
            {"n_embd": 64, "eps": 1e-05, "names": ["é"]},
        ),
        # Mamba's own; no answer in JSON may have such a number.
        ('{"time_step_limit": [0.0, Infinity]}', {"time_step_limit": [0.0, "Infinity"]}),
        ('{"a": -Infinity, "b": NaN, "c": 1e999}', {"a": "-Infinity", "b": "NaN", "c": "1e999"}),
        ('{"a": "\\ud800"}', None),
        ("[" * 50_000, None),
        ("not JSON", None),
        (f'{{"labels": "{"x" * 70_000}"}}', None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_checkpoints_config_is_what_an_answer_can_carry(
    tmp_path: Path, text: str, read: dict[str, object] | None
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert _read_config(tmp_path / "config.json") == read
