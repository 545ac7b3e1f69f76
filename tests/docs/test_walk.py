"""The walk of a request in docs/architecture.md matches a profile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SOMETIMES = {"host/model_process.py", "stores/broker/spool.py"}
"""Files that only some requests call."""


def documented() -> set[str]:
    """Return every file that the table of stations names."""
    walk = (ROOT / "docs" / "architecture.md").read_text().partition("## The walk")[2]
    files = set[str]()
    for row in re.findall(r"^\| \d+ \|.+$", walk.partition("\n## ")[0], re.MULTILINE):
        room = ""
        for name in re.findall(r"`([\w/]+\.py)`", row):
            room = name.rpartition("/")[0] or room
            files.add(f"{room}/{name.rpartition('/')[2]}")
    return files


def test_documented_walk_names_exactly_the_called_files() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "bench.walk"], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    called = set(re.findall(r"^([\w/]+\.py) ", process.stdout, re.MULTILINE))
    assert len(called) > 20, process.stdout + process.stderr
    assert called - SOMETIMES == documented() - SOMETIMES
