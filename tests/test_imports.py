"""What may import what: the help answers at once, the control plane stays free of user code."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ndif
from tests.clients.harness import NDIF

SOURCE = Path(ndif.__file__).parent

# An engine of several machines is imported by the one room that speaks to it, where it is asked for.
ENGINES = {
    "stores/objects/s3": "obstore",
    "stores/broker/redis": "redis",
    "stores/redis/": "redis",
    "cluster/ray": "ray",
    "services/broker": "redis",
}
HEAVY = ("torch", "transformers", "nnsight", "ray", "redis", "obstore")
SERVING = ("starlette", "pydantic", "uvicorn", "socketio")
DANGEROUS = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "torch", "joblib")

DEPTHS = {
    "schema": 0,
    "sandbox": 0,
    "session": 0,
    "runtime": 1,
    "stores": 1,
    "host": 2,
    "cluster": 3,
    "queue": 4,
    "gateway": 5,
    "simulation": 6,
    "services": 6,
    "server": 7,
    "launch": 8,
}
"""A house imports itself and what lies deeper; `stores` and `schema` know none of the others."""

AT_EXIT = """
import atexit, json, os, sys
atexit.register(lambda: os.write(int(os.environ["MODULES"]), json.dumps(list(sys.modules)).encode()))
"""


def modules_of(tmp_path: Path, *arguments: str) -> tuple[set[str], str]:
    """Every top-level module that a Python process has imported when it ends, and what it printed."""
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    report = tmp_path / "modules"
    with report.open("w") as file:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path), "MODULES": str(file.fileno())},
            pass_fds=[file.fileno()],
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(report.read_text())}, done.stdout


# In a process of its own


def test_the_names_looked_for_are_those_of_real_modules() -> None:
    for name in ("torch", "transformers", "nnsight", *SERVING):
        assert importlib.util.find_spec(name) is not None, name


def test_the_command_line_answers() -> None:
    done = subprocess.run([NDIF, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("local", "runtime", "version"):
        assert command in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import ndif.cli.main"],
        ["-m", "ndif", "--help"],
        ["-m", "ndif", "local", "--help"],
        ["-m", "ndif", "local", "start", "--help"],
        ["-m", "ndif", "runtime", "--help"],
        ["-m", "ndif", "runtime", "add", "--help"],
        ["-m", "ndif", "version"],
    ],
    ids=" ".join,
)
def test_the_command_line_imports_nothing_it_does_not_need(
    tmp_path: Path, arguments: list[str]
) -> None:
    imported, _ = modules_of(tmp_path, *arguments)
    assert "ndif" in imported
    assert imported.isdisjoint((*HEAVY, *SERVING, "pynvml"))


@pytest.mark.parametrize("module", ["ndif.server.embedded", "ndif.server.local", "ndif.host.actor"])
def test_the_control_plane_imports_no_model_plane(tmp_path: Path, module: str) -> None:
    imported, _ = modules_of(tmp_path, "-c", f"import {module}")
    assert {"ndif", "pydantic"} <= imported
    # socketio takes redis with it wherever that is installed.
    # The driver is asked by a process of its own.
    assert imported.isdisjoint({*HEAVY, "pynvml"} - {"redis"})


def test_listing_runtimes_imports_no_model_plane(tmp_path: Path) -> None:
    imported, printed = modules_of(tmp_path, "-m", "ndif", "runtime", "list")
    assert "0.8" in printed
    assert imported.isdisjoint(HEAVY)


# In the source


def name_of(file: Path) -> str:
    parts = ("ndif", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


def imports_of(file: Path) -> set[str]:
    """Full names of what a file imports, wherever in it."""
    package = name_of(file) if file.name == "__init__.py" else name_of(file).rpartition(".")[0]
    return imports_in(file.read_text(), package)


def imports_in(text: str, package: str) -> set[str]:
    """`from a import b` is `a` and `a.b`: which of them is the module only its folder can tell."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def houses_of(file: Path) -> set[str]:
    """The houses that a file imports."""
    names = (name.split(".") for name in imports_of(file))
    return {parts[1] for parts in names if parts[0] == "ndif" and len(parts) > 1} & set(DEPTHS)


def files_of(house: str) -> list[Path]:
    return sorted((SOURCE / house).rglob("*.py"))


def test_every_house_has_its_place_in_the_order() -> None:
    houses = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert houses - {"cli"} == set(DEPTHS)


def test_imports_are_found_in_every_form() -> None:
    text = (
        "import a.b as c\nfrom d import e\ndef f():\n    from . import g\n    from ..h.i import j\n"
    )
    assert imports_in(text, "ndif.host") == {
        *("a.b", "d", "d.e"),
        *("ndif.host", "ndif.host.g", "ndif.h.i", "ndif.h.i.j"),
    }


@pytest.mark.parametrize("house", DEPTHS)
def test_a_house_imports_only_what_lies_deeper(house: str) -> None:
    files = files_of(house)
    assert files
    for file in files:
        for other in houses_of(file) - {house}:
            assert DEPTHS[other] < DEPTHS[house], f"{file} imports {other}"


def test_the_order_is_not_empty() -> None:
    """What the houses need of each other is found at all."""
    used = {house: set().union(*map(houses_of, files_of(house))) for house in DEPTHS}
    assert {"queue", "schema", "stores", "host"} <= used["gateway"]
    assert "cluster" in used["queue"]
    assert "host" in used["cluster"]
    assert "runtime" in used["host"]


@pytest.mark.parametrize(
    ("house", "known"), [("runtime", {"runtime", "sandbox"}), ("sandbox", {"sandbox"})]
)
def test_the_model_plane_imports_nothing_of_ndif_but_itself(house: str, known: set[str]) -> None:
    for file in files_of(house):
        ours = {name for name in imports_of(file) if name.partition(".")[0] == "ndif"}
        strangers = {name for name in ours if name.split(".")[1:2] not in [[k] for k in known]}
        assert not strangers, f"{file} imports {strangers}"


def test_no_house_imports_the_command_line() -> None:
    for house in DEPTHS:
        for file in files_of(house):
            assert "ndif.cli" not in imports_of(file), file


def test_the_control_plane_unpickles_nothing() -> None:
    """No `pickle.loads` or its like, and no heavy import hidden in a function."""
    checked = 0
    for file in sorted(SOURCE.rglob("*.py")):
        if file.is_relative_to(SOURCE / "runtime"):
            continue
        if file.is_relative_to(SOURCE / "sandbox" / "protector"):
            continue  # it is entered in runners alone
        checked += 1
        roots = {name.partition(".")[0] for name in imports_of(file)}
        room = file.relative_to(SOURCE).as_posix()
        roots -= {engine for path, engine in ENGINES.items() if room.startswith(path)}
        assert roots.isdisjoint(HEAVY), file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                loads = node.value.id in DANGEROUS and node.attr in ("load", "loads", "Unpickler")
                assert not loads, f"{file}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module in DANGEROUS:
                taken = {alias.name for alias in node.names}
                assert taken.isdisjoint({"load", "loads", "Unpickler"}), f"{file}:{node.lineno}"
    assert checked > 30


def test_only_the_configuration_reads_the_environment_for_settings() -> None:
    """`os.environ` is passed on to child processes; a variable of ours is read in one place."""
    for file in sorted(SOURCE.rglob("*.py")):
        if file == SOURCE / "config.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr != "getenv", f"{file}:{node.lineno}"
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("NDIF_"), f"{file}:{node.lineno}"
