"""Runs a part of a test module in a separate process, so that its memory can be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def apart(module: str, *arguments: str | Path) -> Any:
    """Run `python -m module arguments`; return the JSON that it prints."""
    process = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)
