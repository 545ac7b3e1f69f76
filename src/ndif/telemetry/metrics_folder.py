"""The folder in which processes that share a port keep what they count, so that each can tell of all.

prometheus_client keeps a memory-mapped file of each process there, if a variable names the folder before it
is imported. Source: https://prometheus.github.io/client_python/multiprocess/
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_LIVE = re.compile(r"gauge_live\w+_(\d+)\.db")


def prepare(folder: Path) -> dict[str, str]:
    """Make the folder empty for the processes of one start; return the variable that names it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in folder.glob("*.db"):
        file.unlink(missing_ok=True)
    return {VARIABLE: str(folder)}


def forget_ended(folder: Path) -> None:
    """Delete the gauges of processes that have ended; their counters stay, so that no sum falls."""
    for file in folder.iterdir():
        if (found := _LIVE.fullmatch(file.name)) is not None and not _is_alive(int(found[1])):
            with contextlib.suppress(OSError):
                file.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
