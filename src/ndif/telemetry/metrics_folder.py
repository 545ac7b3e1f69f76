"""The folder in which processes that share a port keep their metrics, so that each can expose all of them.

prometheus_client keeps a memory-mapped file per process in the folder, if an environment variable names the
folder before the import. Source: https://prometheus.github.io/client_python/multiprocess/
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_LIVE = re.compile(r"gauge_live\w+_(\d+)\.db")


def prepare(folder: Path) -> dict[str, str]:
    """Create or empty the folder before the processes start; return the environment variable for it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in folder.glob("*.db"):
        file.unlink(missing_ok=True)
    return {VARIABLE: str(folder)}


def forget_ended(folder: Path) -> None:
    """Delete the gauges of ended processes; keep their counters, so that sums never decrease."""
    for file in folder.iterdir():
        if (match := _LIVE.fullmatch(file.name)) is not None and not _is_alive(int(match[1])):
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
