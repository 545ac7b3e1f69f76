"""The seed of a run: all processes share it, and it reproduces generated values."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fuzzing import seed

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
PLUGINS = ("-p", "xdist", "-p", "_hypothesis_pytestplugin", "-p", "tests.fuzzing")
MADE_UP = """
import os
from hypothesis import given, settings, strategies as st
from tests.fuzzing import dice, examples

def note(test, value):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{test} {value}\\n")

@given(st.integers())
def test_first(number):
    note("first", number)

@settings(max_examples=examples(0.2))
@given(st.integers())
def test_second(number):
    note("second", number)

def test_third():
    note("third", dice().random())
"""


def run(folder: Path, *arguments: str, **environment: str) -> tuple[dict[str, list[str]], int]:
    """Run tests that generate numbers; return the numbers of each test and the printed seed."""
    (folder / "test_made_up.py").write_text(MADE_UP)
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TEST_")}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *PLUGINS, *arguments],
        cwd=folder,
        env={
            **inherited,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(ROOT),
            "NOTES": str(notes),
            **environment,
        },
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    match = re.search(r"^seed (\d+) \(TEST_SEED=\1 repeats it\)$", process.stdout, re.MULTILINE)
    assert match is not None, process.stdout
    numbers_by_test = defaultdict(list)
    for line in notes.read_text().splitlines():
        test, number = line.split()
        numbers_by_test[test].append(number)
    return dict(numbers_by_test), int(match[1])


def test_current_run_has_seed_and_example_profile(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("hypothesis_seed") == str(seed())
    assert settings.get_current_profile_name() in ("suite", "fuzz")
    assert settings().deadline is None


@pytest.mark.parametrize("where", [{}, {"CI": "true"}], ids=["here", "CI"])
def test_run_is_repeated_by_its_printed_seed(where: dict[str, str], tmp_path: Path) -> None:
    first, drawn = run(tmp_path, "--numprocesses", "2", **where)
    again, same = run(tmp_path, TEST_SEED=str(drawn), **where)
    assert (again, same) == (first, drawn)
    assert [len(first[test]) for test in ("first", "second", "third")] == [50, 10, 1]
    other, another = run(tmp_path, **where)
    assert another != drawn
    assert all(other[test] != first[test] for test in first)


def test_hypothesis_seed_option_sets_seed_of_run(tmp_path: Path) -> None:
    numbers_by_test, drawn = run(tmp_path, "--hypothesis-seed", "7")
    assert drawn == 7
    assert numbers_by_test == run(tmp_path, TEST_SEED="7")[0]


def test_fuzz_profile_runs_requested_number_of_examples(tmp_path: Path) -> None:
    numbers_by_test, _ = run(
        tmp_path, "--hypothesis-profile", "fuzz", "-m", "hypothesis", TEST_EXAMPLES="300"
    )
    assert {test: len(numbers) for test, numbers in numbers_by_test.items()} == {
        "first": 300,
        "second": 60,
    }
