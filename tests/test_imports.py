"""Limits of imports: help is fast, and the control plane never loads user code."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import ndif
from tests.commands import NDIF

pytestmark = pytest.mark.process

SOURCE = Path(ndif.__file__).parent

# Only the room of an optional service imports its package, on demand.
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
LOADS = {"load", "loads", "Unpickler"}

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
    "delivery",
    "stores",
    "runtime",
    "sandbox",
    "telemetry",
    "schema",
    "config",
)
"""Rooms from top to bottom: a file imports only its own room and rooms below."""
PLANNED: set[str] = set()
"""Rooms with a floor, but without files yet."""
GROUND = {"__init__", "distribution", "errors", "hostname", "net", "sizes", "tasks"}
"""Modules that every room may import; they import no room."""
CLIENTS = {"probe/trace.py"}
"""Programs that run in a client's interpreter; no module of ndif imports them."""

AT_EXIT = """
import atexit, json, os, sys
atexit.register(lambda: os.write(int(os.environ["MODULES"]), json.dumps(list(sys.modules)).encode()))
"""


def modules_of(tmp_path: Path, *arguments: str) -> tuple[set[str], str]:
    """Return the top-level modules that a Python process has imported at its end, and its output."""
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    report = tmp_path / "modules"
    with report.open("w") as file:
        process = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path), "MODULES": str(file.fileno())},
            pass_fds=[file.fileno()],
            capture_output=True,
            text=True,
        )
    assert process.returncode == 0, process.stderr
    return top_level(json.loads(report.read_text())), process.stdout


def top_level(names: Sequence[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


# Each command line runs in a fork, which starts with the modules that every command line needs.
FORKS = """
import json, os, runpy, sys, traceback
from pathlib import Path
import ndif.cli.main
for number, arguments in enumerate(json.loads(sys.argv.pop())):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    said = os.open(f"said-{number}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv[1:] = arguments
    code = None
    try:
        runpy.run_module("ndif", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    Path(f"modules-{number}").write_text(json.dumps([code or 0, list(sys.modules)]))
    os._exit(0)
"""


def modules_of_commands(
    folder: Path, lines: Sequence[Sequence[str]]
) -> list[tuple[Sequence[str], set[str], str]]:
    """Return the result of `modules_of` for each command line of ndif, with the cost of one process."""
    process = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(lines)], cwd=folder, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    imported_by_line = []
    for number, line in enumerate(lines):
        printed = (folder / f"said-{number}").read_text()
        code, names = json.loads((folder / f"modules-{number}").read_text())
        assert code == 0, f"{line}: {printed}"
        imported_by_line.append((line, top_level(names), printed))
    return imported_by_line


IN_TURN = """
import importlib, json, sys
here = set()
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(json.dumps(sorted(sys.modules.keys() - here)))
    here = {*sys.modules}
"""


def modules_imported_in_turn(*modules: str) -> list[tuple[str, set[str]]]:
    """Import modules one after another in one process; return the top-level modules that each adds."""
    process = subprocess.run(
        [sys.executable, "-c", IN_TURN, *modules], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    added = [top_level(json.loads(line)) for line in process.stdout.splitlines()]
    return [*zip(modules, added, strict=True)]


def surplus(imported_by_name: Iterable[tuple[str, set[str]]], unneeded: Iterable[str]) -> list[str]:
    """Return a line for each import of an unneeded module."""
    return [
        f"{name} imports {other}"
        for name, imported in imported_by_name
        for other in sorted(imported & set(unneeded))
    ]


# Imports of separate processes


def test_checked_module_names_are_importable() -> None:
    for name in ("torch", "transformers", "nnsight", *SERVING):
        assert importlib.util.find_spec(name) is not None, name


def test_help_lists_commands() -> None:
    process = subprocess.run([NDIF, "--help"], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    for command in ("local", "runtime", "version"):
        assert command in process.stdout


COMMAND_LINES = (
    ["--help"],
    ["local", "--help"],
    ["local", "start", "--help"],
    ["runtime", "--help"],
    ["runtime", "add", "--help"],
    ["version"],
)


def test_command_line_imports_no_unneeded_modules(tmp_path: Path) -> None:
    for arguments in (["-c", "import ndif.cli.main"], ["-m", "ndif", "--help"]):
        imported, _ = modules_of(tmp_path, *arguments)
        assert "ndif" in imported
        assert imported.isdisjoint((*HEAVY, *SERVING, "pynvml"))
    imported_by_name = [
        (" ".join(line), imported)
        for line, imported, _ in modules_of_commands(tmp_path, COMMAND_LINES)
    ]
    assert all("ndif" in imported for _, imported in imported_by_name)
    assert surplus(imported_by_name, (*HEAVY, *SERVING, "pynvml")) == []


def test_forked_process_reports_imports_of_its_command(tmp_path: Path) -> None:
    """`modules_of_commands` and `modules_of` return the same modules."""
    line = ("runtime", "list")
    ((_, imported, printed),) = modules_of_commands(tmp_path, [line])
    alone, printed_alone = modules_of(tmp_path, "-m", "ndif", *line)
    assert printed == printed_alone
    # Modules that report the imports.
    assert imported - alone <= {"runpy", "traceback"}
    assert alone - imported <= {"sitecustomize", "atexit"}


SERVERS = ("ndif.server.embedded", "ndif.server.local")


def test_control_plane_imports_no_model_plane() -> None:
    imported_by_name = modules_imported_in_turn(*SERVERS, "ndif.host.model_actor")
    assert {"ndif", "pydantic"} <= imported_by_name[0][1]
    # socketio imports redis if it is installed.
    # A separate process queries the driver.
    assert surplus(imported_by_name, {*HEAVY, "pynvml"} - {"redis"}) == []


def test_single_process_server_needs_no_engine() -> None:
    """An installation without extras lacks the clients of Redis, S3 and Ray."""
    code = f"import sys; sys.modules.update(dict.fromkeys({ENGINE_PACKAGES!r}));" + "".join(
        f"import {module};" for module in SERVERS
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_listing_runtimes_imports_no_model_plane(tmp_path: Path) -> None:
    imported, printed = modules_of(tmp_path, "-m", "ndif", "runtime", "list")
    assert "0.8" in printed
    assert imported.isdisjoint(HEAVY)


# Imports in the source


def name_of(file: Path) -> str:
    parts = ("ndif", *file.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@pytest.fixture(scope="module", autouse=True)
def _let_the_trees_go() -> Iterator[None]:
    """Free a hundred megabytes for the tests of the next module."""
    yield
    tree_of.cache_clear()


@cache
def imports_of(file: Path) -> dict[str, int]:
    """Return the full names of all imports anywhere in a file, each with its first line."""
    package = name_of(file) if file.name == "__init__.py" else name_of(file).rpartition(".")[0]
    return imports_in(tree_of(file), package)


def imports_in(tree: ast.Module, package: str) -> dict[str, int]:
    """Return the imports of a tree; `from a import b` counts as `a` and `a.b`: either may be the module."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            lines.setdefault(name, node.lineno)
    return lines


MODULES = {name_of(file): file for file in sorted(SOURCE.rglob("*.py"))}


@cache
def modules_imported_by(module: str) -> frozenset[str]:
    """Return the modules of ndif that a module imports, without itself.

    `from package import module` is an import of that module, and not of names in `package/__init__.py`.
    """
    names = imports_of(MODULES[module]).keys()
    of_modules = {name.rpartition(".")[0] for name in names & set(MODULES)}
    of_values = {name.rpartition(".")[0] for name in names - set(MODULES)}
    return frozenset((names & set(MODULES)) - (of_modules - of_values) - {module, "ndif"})


def place_of_import(module: str, imported: str) -> str:
    file = MODULES[module]
    return f"{file.relative_to(SOURCE)}:{imports_of(file)[imported]}"


def room_of(module: str) -> str:
    return module.split(".")[1]


def files_of(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


def test_every_room_has_its_floor() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms == set(ROOMS) - PLANNED


def test_contributing_map_lists_every_room_in_order() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    table = text.partition("## The map")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == ROOMS
    assert {path.stem for path in SOURCE.glob("*.py")} - {"__main__"} == GROUND


def test_checker_finds_imports_in_every_form() -> None:
    text = (
        "import a.b as c\nfrom d import e\ndef f():\n    from . import g\n    from ..h.i import j\n"
    )
    assert imports_in(ast.parse(text), "ndif.host") == {
        "a.b": 1,
        "d": 2,
        "d.e": 2,
        "ndif.host": 4,
        "ndif.host.g": 4,
        "ndif.h.i": 5,
        "ndif.h.i.j": 5,
    }


def lies_deeper(imported: str, module: str) -> bool:
    """Return True if a module may import another: of its own room, a room below, or the ground."""
    if room_of(imported) in GROUND:
        return True
    return room_of(module) not in GROUND and (
        ROOMS.index(room_of(imported)) >= ROOMS.index(room_of(module))
    )


def test_checker_orders_rooms_by_floor() -> None:
    assert lies_deeper("ndif.host.frames", "ndif.queue.job")
    assert lies_deeper("ndif.queue.turns", "ndif.queue.job")
    assert lies_deeper("ndif.sizes", "ndif.net")
    assert not lies_deeper("ndif.queue.job", "ndif.host.frames")
    assert not lies_deeper("ndif.config.settings", "ndif.net")


def test_files_import_only_deeper_rooms() -> None:
    upwards = [
        f"{place_of_import(module, imported)}: {imported} does not lie deeper"
        for module in sorted(set(MODULES) - {"ndif", "ndif.__main__"})
        for imported in sorted(modules_imported_by(module))
        if not lies_deeper(imported, module)
    ]
    assert not upwards, "\n".join(upwards)


def test_imports_have_no_cycles() -> None:
    remaining = {module: modules_imported_by(module) for module in MODULES}
    while leaves := {module for module, imported in remaining.items() if not imported}:
        remaining = {m: imported - leaves for m, imported in remaining.items() if m not in leaves}
    assert not remaining, "each of these imports another of them, or one that does"


def test_checker_finds_imports_between_rooms() -> None:
    """The checker of this module finds imports between rooms."""
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
    ("room", "allowed"), [("runtime", {"runtime", "sandbox", "sizes"}), ("sandbox", {"sandbox"})]
)
def test_model_plane_imports_only_its_own_rooms_of_ndif(room: str, allowed: set[str]) -> None:
    strangers = [
        f"{file.relative_to(SOURCE)}:{line}: {name}"
        for file in files_of(room)
        for name, line in imports_of(file).items()
        if name.partition(".")[0] == "ndif" and name.split(".")[1:2] not in [[k] for k in allowed]
    ]
    assert not strangers, "\n".join(strangers)


def loads_in(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that read objects of any class, with `pickle.loads` or a similar call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in DANGEROUS and node.attr in LOADS:
                yield node.lineno
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module in DANGEROUS
            and not LOADS.isdisjoint(alias.name for alias in node.names)
        ):
            yield node.lineno


def test_checker_finds_unpickling_in_every_form() -> None:
    text = "import pickle\npickle.loads(b'')\nfrom dill import load as l\ntorch.load\njson.load\n"
    assert [*loads_in(ast.parse(text))] == [3, 4, 2]


def test_control_plane_unpickles_nothing() -> None:
    """No `pickle.loads` or similar call, and no heavy import in a function."""
    checked = 0
    findings = []
    for file in MODULES.values():
        if file.is_relative_to(SOURCE / "runtime"):
            continue
        if file.is_relative_to(SOURCE / "sandbox" / "protector"):
            continue  # only runners call it
        checked += 1
        room = file.relative_to(SOURCE).as_posix()
        if room in CLIENTS:
            continue
        allowed = {
            engine
            for path, engines in ENGINES.items()
            if room.startswith(path)
            for engine in engines.split()
        }
        findings += [
            f"{room}:{line}: imports {name}"
            for name, line in imports_of(file).items()
            if name.partition(".")[0] in set(HEAVY) - allowed
        ]
        findings += [f"{room}:{line}: loads" for line in loads_in(tree_of(file))]
    assert not findings, "\n".join(findings)
    assert checked > 30


def test_no_module_imports_client_programs() -> None:
    names = {name_of(SOURCE / client) for client in CLIENTS}
    assert names <= MODULES.keys()
    importers = [
        place_of_import(module, client)
        for module in MODULES
        for client in names & modules_imported_by(module)
    ]
    assert not importers, "\n".join(importers)


def test_only_config_reads_settings_from_environment() -> None:
    """`os.environ` is passed on to child processes, but only one module reads ndif's own variables."""
    findings = []
    for file in MODULES.values():
        if file.parent == SOURCE / "config" and file.stem in ("groups", "settings", "ndif_names"):
            continue
        place = file.relative_to(SOURCE).as_posix()
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "getenv":
                    findings.append(f"{place}:{node.lineno}: getenv")
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith("NDIF_")
            ):
                findings.append(f"{place}:{node.lineno}: {node.value}")
    assert not findings, "\n".join(findings)
