"""A runner's read access to folders on Python's search path and to loaded libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import ndif
from ndif.config.settings import Settings
from ndif.launch.machine_checks import check_machine

pytestmark = pytest.mark.process

PROGRAM = """
import ctypes, json, sys
import helper, single
ctypes.CDLL(sys.argv[1])
from ndif.sandbox.confinement.confinement import interpreter_paths
print(json.dumps([str(path) for path in interpreter_paths()]))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's home, with a module, packages, a library and private files."""
    home = (tmp_path / "home").resolve()
    for name in ("helper/__init__.py", "unused/__init__.py", "single.py", "secret", "lib/secret"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    folder = Path(json.__file__).parents[1] / "lib-dynload"
    library = next(folder.glob(f"*{EXTENSION_SUFFIXES[0]}"))
    shutil.copy(library, home / "lib" / "own.so")
    return home


def test_only_loaded_parts_of_search_path_folder_are_readable(home: Path, tmp_path: Path) -> None:
    overlay = (tmp_path / "overlay").resolve()
    (overlay / "nnsight-0.7.0.dist-info").mkdir(parents=True)
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, home / "lib" / "own.so"],
        env={**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{overlay}", "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    readable = {Path(path) for path in json.loads(answer.stdout)}
    of_home = {path for path in readable if path.is_relative_to(home)}
    assert of_home == {home / "helper", home / "single.py", home / "lib" / "own.so"}
    for folder in (home / "secret", home / "lib" / "secret", Path.home() / ".netrc", Path.cwd()):
        assert not any(folder.is_relative_to(path) for path in readable), folder
    assert {
        overlay,
        Path(ndif.__file__).parent.resolve(),
        Path(json.__file__).parents[1],
    } <= readable


def test_doctor_notes_search_path_folder_with_more_than_packages(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{home}{os.pathsep}")
    [check] = [check for check in check_machine(Settings()) if check.name == "PYTHONPATH"]
    assert check.state == "note"
    assert check.detail.startswith(f"{home} holds more than installed packages")
