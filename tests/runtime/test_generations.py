"""Facts about a model that its host may publish, and errors about absent modules."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest

from ndif.runtime.generations import (
    PayloadError,
    _read_config,
    explain_absent,
    find_class,
    unpickling_errors,
)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (
            '{"n_embd": 64, "eps": 1e-05, "names": ["é"]}',
            {"n_embd": 64, "eps": 1e-05, "names": ["é"]},
        ),
        # Mamba's config has such a number, which standard JSON forbids.
        ('{"time_step_limit": [0.0, Infinity]}', {"time_step_limit": [0.0, "Infinity"]}),
        ('{"a": -Infinity, "b": NaN, "c": 1e999}', {"a": "-Infinity", "b": "NaN", "c": "1e999"}),
        ('{"a": "\\ud800"}', None),
        ("[" * 50_000, None),
        ("not JSON", None),
        (f'{{"labels": "{"x" * 70_000}"}}', None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_checkpoint_config_is_reduced_to_valid_json(
    tmp_path: Path, text: str, read: dict[str, object] | None
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert _read_config(tmp_path / "config.json") == read


class Unpickler(pickle.Unpickler):
    """An unpickler that looks up names like nnsight's."""

    def find_class(self, module: str, name: str, /) -> Any:
        return find_class(self, module, name)


@pytest.mark.parametrize(
    ("payload", "is_name"),
    [
        (b"chelpers.work\nweight\n.", True),
        (b"cimportlib\nimport_module\n(Vhelpers\ntR.", False),
        (b"chelpers\nweight\n.", True),
    ],
    ids=["below", "module", "name"],
)
def test_missing_user_module_error_suggests_register(payload: bytes, is_name: bool) -> None:
    with pytest.raises(PayloadError) as caught, unpickling_errors("0.8"):
        Unpickler(io.BytesIO(payload)).load()
    message = str(caught.value)
    assert "`import helpers; nnsight.register(helpers)` before the trace" in message
    # A registered module does not include its cached functions.
    assert ("has sent the name 'weight' alone" in message) is is_name
    assert ("functools.lru_cache" in message) is is_name


def test_error_names_missing_dependency_of_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "is_here_for_a_test.py").write_text("import needed_by_a_test")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PayloadError) as caught, unpickling_errors("0.8"):
        Unpickler(io.BytesIO(b"cis_here_for_a_test\nname\n.")).load()
    assert "uses the module 'needed_by_a_test', which" in str(caught.value)


def test_absent_peft_wrapper_path_error_suggests_newer_client() -> None:
    message = explain_absent("Module:model.base_model.model.transformer.h.0")
    assert "pip install 'nnsight>=0.8.0'" in message
    assert "second model" in explain_absent("Module:model.transformer.h.0.probe")
