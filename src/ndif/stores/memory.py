"""The memory of this machine, as the kernel counts it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_KIB = 1024
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", ""),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_",
    ),
)
"""Files of a container's limit, usage and parts of the usage, and the parts' prefix: cgroups 2, then 1."""
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_LEAST_AVAILABLE = 0.1
_KEPT = 0.02
"""Fraction of the memory that results leave free; models may take most of the memory."""


class MachineMemory(NamedTuple):
    """Bytes of memory of a machine or container, and the bytes that a process may still take."""

    total: int
    available: int


def memories(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> Iterator[MachineMemory]:
    """Yield the memory of this machine, and of its container if it has a limit."""
    fields = _numbers(meminfo)
    yield MachineMemory(fields["MemTotal"] * _KIB, fields["MemAvailable"] * _KIB)
    for limited, current, stat, prefix in _CGROUP_FILES:
        try:
            limit = int((cgroup / limited).read_text())
            used, parts = int((cgroup / current).read_text()), _numbers(cgroup / stat)
        except (OSError, ValueError):  # another version; "max": no limit
            continue
        # The page cache counts as used, but the kernel frees it on demand.
        reclaimable = parts[f"{prefix}active_file"] + parts[f"{prefix}inactive_file"]
        yield MachineMemory(limit, limit - used + reclaimable)


@functools.cache
def total_memory() -> int:
    """Return the bytes of memory of this machine."""
    return next(memories()).total


def memory_is_short(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> bool:
    """Return True if less than a tenth of the memory of this machine, or of its container, is available."""
    candidates = memories(meminfo, cgroup)
    return any(memory.available < _LEAST_AVAILABLE * memory.total for memory in candidates)


def left_for_results() -> int:
    """Return the bytes of memory that results may take now until they are stored."""
    return max(0, int(min(memory.available - _KEPT * memory.total for memory in memories())))


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers in a kernel file by name; each line has one name and one number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
