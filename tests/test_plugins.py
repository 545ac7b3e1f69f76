"""The plugins of this suite: their reports on costs and failures, and the rules that they enforce."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
PLUGINS = ("tests.costs", "tests.failures", "tests.leftovers", "tests.markers")


def run(folder: Path, source: str, *options: str) -> str:
    """Return the output of pytest for a file of tests."""
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder)]
    plugins = [option for name in PLUGINS for option in ("-p", name)]
    process = subprocess.run(
        [*command, *plugins, *options, str(folder / "test_it.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return process.stdout


def test_unit_test_that_starts_process_fails(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        "import subprocess, pytest\n"
        "def test_unmarked(): subprocess.run(['true'])\n"
        "def test_fork():\n    import os\n    os.waitpid(os.fork() or os._exit(0), 0)\n"
        "@pytest.mark.process\n"
        "def test_marked(): subprocess.run(['true'])\n",
    )
    assert "2 failed, 1 passed" in output
    assert "a unit test started a process (os.fork ())" in output
    assert "a unit test started a process (subprocess.Popen ('true', ['true'])" in output


def test_run_ends_with_cost_summary(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        "import time, pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def heavy():\n    time.sleep(0.05)\n    yield\n    time.sleep(0.05)\n"
        "@pytest.mark.parametrize('number', range(20))\n"
        "def test_one(heavy, number): pass\n",
        *("-n", "2"),
    )
    assert "20 passed" in output
    for title in ("core-seconds by folder", "slowest files", "slowest fixtures"):
        assert f" {title} " in output
    (fixture,) = [line for line in output.splitlines() if line.endswith("::heavy")]
    setup, call, teardown, _, times, _ = fixture.split()
    assert 0.05 <= float(setup.rstrip("s")) >= 0.05 <= float(teardown.rstrip("s"))
    assert (call, times) == ("0.0s", "1")
    assert "load of the last 1, 5 and 15 minutes" in output


def test_run_reports_retries(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        "from tests.failures import retry\ndef test_it(): retry('an attack', 'it was late')\n",
        *("-n", "1"),
    )
    assert "tried a second time: 1\n  an attack: it was late\n" in output


def test_hanging_test_shows_stacks_of_its_processes(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        "import subprocess, sys, pytest\n"
        "@pytest.mark.process\n"
        "def test_it():\n"
        "    code = 'def here(): input()\\nhere()'\n"
        "    process = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE)\n"
        "    process.wait()\n",
        *("--timeout", "3"),
    )
    assert "1 failed" in output
    assert "stacks of its processes" in output
    assert "here (<string>:1)" in output


def test_module_that_leaves_changed_process_state_fails(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        "import torch\n"
        "def test_it(): torch.set_default_dtype(torch.float64)\n"
        "def test_the_next(): pass\n",
    )
    assert "test_it.py leaves in its process: {'torch._default_dtype'" in output
