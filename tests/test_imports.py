"""Limits of imports: the help answers at once, the control plane stays free of user code."""

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
    "stores/accounts/sql/": "sqlalchemy alembic",
    "stores/usage/sql.py": "sqlalchemy",
    "stores/objects/s3": "obstore",
    "stores/broker/redis/": "redis",
    "stores/redis": "redis",
    "cluster/ray/": "ray",
    "launch/services/redis": "redis",
    "telemetry/influxdb": "influxdb_client",
}
ENGINE_PACKAGES = tuple(sorted({name for names in ENGINES.values() for name in names.split()}))
DATABASES = ("sqlalchemy", "alembic", "aiosqlite", "asyncpg")
HEAVY = (
    *("torch", "transformers", "nnsight", "ray", "redis", "obstore", "influxdb_client"),
    *DATABASES,
)
SERVING = ("starlette", "pydantic", "uvicorn", "socketio")
DANGEROUS = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "torch", "joblib")

ROOMS = (
    "cli",
    "launch",
    "server",
    "simulation",
    "dashboard",
    "gateway",
    "control",
    "alerts",
    "queue",
    "cluster",
    "schedule",
    "placement",
    "probe",
    "host",
    "stores",
    "runtime",
    "sandbox",
    "telemetry",
    "schema",
    "config",
)
"""From the top floor to the ground: a file imports its own room and rooms below it."""
PLANNED: set[str] = set()
"""Rooms that have their floor and no file yet."""
GROUND = {"__init__", "distribution", "errors", "net", "sizes", "tasks"}
"""Modules that every room may import, and that import no room."""
CLIENTS = {"probe/trace.py"}
"""Programs for a process of their own with a client's interpreter; nothing of ndif imports them."""

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


@pytest.mark.parametrize(
    "module", ["ndif.server.embedded", "ndif.server.local", "ndif.host.model_actor"]
)
def test_the_control_plane_imports_no_model_plane(tmp_path: Path, module: str) -> None:
    imported, _ = modules_of(tmp_path, "-c", f"import {module}")
    assert {"ndif", "pydantic"} <= imported
    # socketio takes redis with it wherever that is installed.
    # The driver is asked by a process of its own.
    assert imported.isdisjoint({*HEAVY, "pynvml"} - {"redis"})


@pytest.mark.parametrize("module", ["ndif.server.embedded", "ndif.server.local"])
def test_a_server_of_one_process_needs_no_engine(module: str) -> None:
    """An installation without extras leaves the clients of Redis, S3 and Ray out."""
    code = f"import sys; sys.modules.update(dict.fromkeys({ENGINE_PACKAGES!r})); import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


MODULES = {name_of(file): file for file in sorted(SOURCE.rglob("*.py"))}


def modules_imported_by(module: str) -> set[str]:
    """Return the modules of ndif that a module imports, itself excepted.

    `from package import module` is an import of that module, and not of what `package/__init__.py` defines.
    """
    names = imports_of(MODULES[module])
    of_modules = {name.rpartition(".")[0] for name in names & set(MODULES)}
    of_values = {name.rpartition(".")[0] for name in names - set(MODULES)}
    return (names & set(MODULES)) - (of_modules - of_values) - {module, "ndif"}


def room_of(module: str) -> str:
    return module.split(".")[1]


def files_of(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


def test_every_room_has_its_floor() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms == set(ROOMS) - PLANNED
    assert {path.stem for path in SOURCE.glob("*.py")} - {"__main__"} == GROUND


def test_imports_are_found_in_every_form() -> None:
    text = (
        "import a.b as c\nfrom d import e\ndef f():\n    from . import g\n    from ..h.i import j\n"
    )
    assert imports_in(text, "ndif.host") == {
        *("a.b", "d", "d.e"),
        *("ndif.host", "ndif.host.g", "ndif.h.i", "ndif.h.i.j"),
    }


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"ndif", "ndif.__main__"}))
def test_a_file_imports_only_what_lies_deeper(module: str) -> None:
    imported = modules_imported_by(module)
    if room_of(module) in GROUND:
        assert {room_of(other) for other in imported} <= GROUND
        return
    floor = ROOMS.index(room_of(module))
    upwards = {
        other
        for other in imported
        if room_of(other) not in GROUND and ROOMS.index(room_of(other)) < floor
    }
    assert not upwards


def test_no_files_import_each_other_in_a_circle() -> None:
    remaining = {module: modules_imported_by(module) for module in MODULES}
    while leaves := {module for module, imported in remaining.items() if not imported}:
        remaining = {m: imported - leaves for m, imported in remaining.items() if m not in leaves}
    assert not remaining, "each of these imports another of them, or one that does"


def test_the_order_is_not_empty() -> None:
    """Imports between rooms are found at all."""
    used = {
        room: {
            room_of(other)
            for file in files_of(room)
            for other in modules_imported_by(name_of(file))
        }
        for room in ROOMS
    }
    assert {"queue", "schema", "stores"} <= used["gateway"] | used["control"]
    assert "cluster" in used["queue"]
    assert "host" in used["cluster"]
    assert "runtime" in used["host"]


@pytest.mark.parametrize(
    ("room", "known"), [("runtime", {"runtime", "sandbox", "sizes"}), ("sandbox", {"sandbox"})]
)
def test_the_model_plane_imports_nothing_of_ndif_but_itself(room: str, known: set[str]) -> None:
    for file in files_of(room):
        ours = {name for name in imports_of(file) if name.partition(".")[0] == "ndif"}
        strangers = {name for name in ours if name.split(".")[1:2] not in [[k] for k in known]}
        assert not strangers, f"{file} imports {strangers}"


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
        if room in CLIENTS:
            continue
        for path, engines in ENGINES.items():
            roots -= set(engines.split()) if room.startswith(path) else set()
        assert roots.isdisjoint(HEAVY), file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                loads = node.value.id in DANGEROUS and node.attr in ("load", "loads", "Unpickler")
                assert not loads, f"{file}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module in DANGEROUS:
                taken = {alias.name for alias in node.names}
                assert taken.isdisjoint({"load", "loads", "Unpickler"}), f"{file}:{node.lineno}"
    assert checked > 30


def test_nothing_imports_the_programs_of_clients() -> None:
    names = {name_of(SOURCE / client) for client in CLIENTS}
    assert names <= MODULES.keys()
    for module in MODULES:
        assert names.isdisjoint(modules_imported_by(module)), module


def test_only_the_configuration_reads_the_environment_for_settings() -> None:
    """`os.environ` is passed on to child processes; a variable of ours is read in one place."""
    for file in sorted(SOURCE.rglob("*.py")):
        if file == SOURCE / "config" / "settings.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr != "getenv", f"{file}:{node.lineno}"
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("NDIF_"), f"{file}:{node.lineno}"
