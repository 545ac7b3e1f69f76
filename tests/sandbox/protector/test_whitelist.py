"""The operator's file that extends the whitelist, and the errors of an invalid file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndif.sandbox.protector import Protector
from tests.sandbox.protector.running import FILE


def run(protector: Protector, source: str) -> dict[str, object]:
    scope: dict[str, object] = {}
    protector.execute(protector.compile(source, FILE), scope)
    return scope


def test_operators_whitelist_adds_modules(tmp_path: Path) -> None:
    extra = tmp_path / "whitelist.yaml"
    extra.write_text(
        "modules:\n"
        "  - name: base64\n"
        "  - name: xml\n    strict: false\n    denied: {sax: it opens connections}\n"
        "  - name: colorsys\n    only: [rgb_to_hsv]\n"
    )
    protector = Protector(extra)
    assert run(protector, "import base64\nx = base64.b64encode(b'a')")["x"] == b"YQ=="
    run(protector, "import xml.etree.ElementTree as E\nE.Element('a')")
    with pytest.raises(
        ImportError, match=r"xml.sax' is not available on this server: it opens conn"
    ):
        run(protector, "import xml.sax\nimport xml.sax as s\ns.parse")
    with pytest.raises(AttributeError, match=r"available from colorsys: rgb_to_hsv"):
        run(protector, "import colorsys\ncolorsys.hsv_to_rgb")
    with pytest.raises(ImportError, match=r"base64"):
        run(Protector(), "import base64\nbase64.b64encode")


def test_a_strict_module_comes_without_submodules(tmp_path: Path) -> None:
    extra = tmp_path / "whitelist.yaml"
    extra.write_text("modules:\n  - name: xml\n    strict: true\n")
    with pytest.raises(ImportError, match=r"module 'xml.etree' is not available"):
        run(Protector(extra), "import xml.etree as e\ne.ElementTree")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("modules: [", "is not YAML"),
        ("- a", "must be a mapping of deserialization, model, modules, nnsight, objects"),
        ("module: []", "has a section 'module'; it may have"),
        ("modules: {a: 1}", "modules must be a list of mappings"),
        ("modules:\n - name: a b", "name must be the name of a module: 'a b'"),
        ("modules:\n - strict: true", "name must be the name of a module: None"),
        ("modules:\n - name: a\n   strict: maybe", "strict of a must be true or false"),
        ("modules:\n - name: a\n   denied: [b]", "denied must be a mapping of names to reasons"),
        ("modules:\n - name: a\n   only: b", "only must be a list of names: 'b'"),
        ("modules:\n - name: a\n   onyl: [b]", "a has an unknown 'onyl'"),
        ("deserialization:\n - module: a", "names must be a list of names: None"),
    ],
)
def test_invalid_whitelist_is_reported_with_its_path(
    tmp_path: Path, content: str, message: str
) -> None:
    extra = tmp_path / "whitelist.yaml"
    extra.write_text(content)
    with pytest.raises(ValueError, match=r"The whitelist|In the whitelist") as caught:
        Protector(extra)
    assert message in str(caught.value)
    assert str(extra) in str(caught.value)


def test_missing_whitelist_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: No such file or directory"):
        Protector(tmp_path / "none.yaml")


def test_missing_package_and_unregistered_module_are_reported(tmp_path: Path) -> None:
    extra = tmp_path / "whitelist.yaml"
    extra.write_text("modules:\n  - name: not_installed_here\n")
    protector = Protector(extra)
    run(protector, "import not_installed_here")
    with pytest.raises(
        ImportError, match=r"'not_installed_here' .*: its operator has not installed it"
    ):
        run(protector, "import not_installed_here as a\na.b")
    with pytest.raises(ImportError) as caught:
        run(protector, "import my_own_module\nmy_own_module.f()")
    message = str(caught.value)
    assert "`import my_own_module; nnsight.register(my_own_module)` before the trace" in message
    assert "not_installed_here" not in message, "it offers what is not there"
    assert "logging, math" in message
