"""Where a replica's weights are: on a card, or on the CPU with an owner and its zygote as on a card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ndif.host.runtimes import Runtime
from tests.runtime.replica import HERE

GIB = 1 << 30
STAND_IN = Path(__file__).parents[1] / "runtime" / "pretend_driver.py"


def pretending(folder: Path) -> Runtime:
    """Return an interpreter whose model processes have an owner; files in `folder` stand for a card."""
    weights = folder / "weights"
    weights.mkdir(parents=True)
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$3" {weights}\n')
    interpreter.chmod(0o755)
    return Runtime("0.8", "0.8", interpreter, ())


def where(device: str, folder: Path, memory: int) -> tuple[Runtime, dict[str, Any]]:
    """Return a replica's runtime and what it is given: `memory` bytes of the first card, or a stand-in."""
    if device == "cpu":
        return pretending(folder), {}
    return HERE, {"gpu_mem_bytes_by_id": {0: memory}}
