"""The demo, as `make demo` runs it: a real pretrained model and real clients of two generations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent


def test_demo_predicts_paris(runtimes: Path, smollm2: Path) -> None:
    assert (runtimes / "0.7").is_dir()
    assert (smollm2 / "config.json").is_file()
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "│    29 │ ' Paris'" in run.stdout, run.stdout
    assert "unchanged, it predicts ' Paris'" in run.stdout
    assert "The same traces in this process give the same values." in run.stdout
    assert "gets the token ' Paris', too." in run.stdout
