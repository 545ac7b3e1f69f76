"""The machine and the versions behind a report's figures."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_PACKAGES = {
    "ndif": "ndif-server",
    **{name: name for name in ("nnsight", "torch", "transformers", "ray", "uvloop")},
}


def loop_seconds() -> float:
    """Return the seconds of a loop of five million steps, the median of seven.

    Two runs are comparable only if these seconds are the same: a shared machine's speed changes.
    """
    took = []
    for _ in range(7):
        began = time.perf_counter()
        total = 0
        for number in range(5_000_000):
            total += number
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def machine_state() -> dict[str, Any]:
    """Return facts about this machine, the installed versions, and the current load and speed."""
    load = os.getloadavg()  # before the loop increases the load
    changes = _git("status", "--porcelain")
    return {
        "cpus": os.cpu_count(),
        "cpu": _cpu(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(package) for name, package in _PACKAGES.items()},
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": changes if changes is None else changes != "",
        "load_average": load,
        "loop_seconds": loop_seconds(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Return a phrase that describes a report's machine."""
    return f"{machine['cpus']} x {machine['cpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB"


def _cpu() -> str:
    with contextlib.suppress(OSError):
        # The file of an ARM machine has no such line.
        if match := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M):
            return match[1]
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    """Return the output of a git command in this repository; None without git or a repository."""
    try:
        process = subprocess.run(
            ["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.strip()
