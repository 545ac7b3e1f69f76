"""The parts of `make gpu` and `make gpu-kit`, without a GPU or a network."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench.gpu import STEPS
from packaging.requirements import Requirement
from rich.console import Console

from tests.gpu.__main__ import STAGES, WHOLE_S, Outcome, Stage, limits, run, show
from tests.gpu.kit import applies, pins, project_requirements, target_environment
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

HANGING = """
import json, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(json.dumps({"table": [["first", "passed", "[cuda]"]]}))
time.sleep(600)
"""

SOME_TESTS = """
import pytest, time
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
def test_hanging(): time.sleep(600)
"""


def hanging(results: Path, limit_s: float) -> list[str]:
    return [sys.executable, "-c", HANGING, str(results)]


def test_benchmark_runs_on_cpu(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    process = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--json", path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(path.read_text())
    assert report["problems"] == {}, process.stderr
    assert process.returncode == 0
    assert len(report["figures"]) >= len(STEPS)


def test_hanging_stage_is_stopped_and_keeps_its_results(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = run(Stage("one", hanging, 0), tmp_path, 2)
    assert time.monotonic() - began < 60
    assert not outcome.ok
    assert outcome.problem == "took too long"
    assert outcome.results["table"] == [["first", "passed", "[cuda]"]]
    output = io.StringIO()
    console = Console(width=100, file=output)
    show([outcome, Outcome("two", True, 1.0)], console)
    assert "[cuda]" in output.getvalue()


def test_stage_limit_reserves_time_for_later_stages() -> None:
    assert limits(STAGES, WHOLE_S) == WHOLE_S - sum(stage.reserved_s for stage in STAGES[1:])
    assert limits(STAGES, WHOLE_S) >= STAGES[0].reserved_s
    assert limits(STAGES[-1:], 200) == 200
    assert WHOLE_S < 9 * 60


def test_interrupted_run_leaves_recorded_outcomes(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.recording", "--record=r.json"]
    process = subprocess.Popen(
        [*command, "test_some.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    try:
        text = until(lambda: "test_hanging" in (content := read(tmp_path / "r.json")) and content)
    finally:
        process.kill()
        process.wait()
    outcomes = {row[0]: row[1:] for row in json.loads(text)["table"]}
    assert outcomes["test_some.py::test_good"][0] == "passed"
    assert outcomes["test_some.py::test_bad"] == ["failed", "assert 1 == 2"]
    assert outcomes["test_some.py::test_skipped"] == ["skipped", "not here"]
    assert outcomes["test_some.py::test_hanging"][0] == "running"


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def start(folder: Path, *options: str) -> str:
    """Run start.py of a kit unpacked to `folder`, and return its error output."""
    program = folder / "tests" / "gpu" / "start.py"
    program.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "gpu" / "start.py", program)
    process = subprocess.run(
        [sys.executable, *options, program], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    return process.stderr


def test_kit_rejects_python_without_torch(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    assert "has no torch. Run this with a Python that has" in start(tmp_path, "-I", "-S")


def test_kit_rejects_wheels_of_another_python_version(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "pydantic_core-1-cp39-cp39-linux_x86_64.whl").touch()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"not of Python {version}. Build one: make gpu-kit PYTHON={version}" in start(tmp_path)


@pytest.mark.parametrize(("python", "version"), [("3.10", "5.20.2"), ("3.12", "5.22.2")])
def test_kit_pins_versions_for_target_python(python: str, version: str) -> None:
    lines = ["# a comment", "", 'transformers==5.22.2; python_version >= "3.11"']
    lines += ['transformers==5.20.2; python_version < "3.11"', "PyYAML==6.0.3"]
    requirements = pins(lines, target_environment(python))
    assert requirements == {"transformers": f"transformers=={version}", "pyyaml": "PyYAML==6.0.3"}


def test_kit_markers_follow_extras_and_platform() -> None:
    environment = target_environment("3.12")
    assert not applies(Requirement("colorama; sys_platform == 'win32'"), environment, set())
    assert not applies(Requirement("x; extra == 'server'"), environment, set())
    assert applies(Requirement("x; extra == 'server'"), environment, {"server"})


def test_every_project_requirement_is_pinned() -> None:
    environment = target_environment("3.12")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    exact = {name.lower() for name in pins(lines, environment)}
    for requirement in project_requirements():
        if applies(requirement, environment, set()):
            assert requirement.name.lower().replace("_", "-") in exact
