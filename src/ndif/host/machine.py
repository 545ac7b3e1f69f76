"""This machine: its name, and its memory as far as models may take it."""

from __future__ import annotations

import platform
from pathlib import Path

_KIB = 1024
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def name() -> str:
    """What it is called."""
    return platform.node() or "localhost"


def cpu_memory(
    meminfo: Path = Path("/proc/meminfo"), limits: tuple[Path, ...] = _CGROUP_LIMITS
) -> int:
    """Bytes of memory that this process and its children may have: the machine's, or its container's."""
    total = next(
        int(line.split()[1]) * _KIB
        for line in meminfo.read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    for limit in limits:
        try:
            text = limit.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # else "max": there is none
            total = min(total, int(text))
    return total
