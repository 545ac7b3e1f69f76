"""The facts that are read of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from ndif.host.environment import cpu_memory

GiB = 1 << 30


def test_its_memory_is_what_the_system_says() -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < cpu_memory() <= whole


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemFree:        1 kB\n")
    limit = tmp_path / "memory.max"
    missing = tmp_path / "none"
    for text, expected in (
        ("max\n", 16 * GiB),
        (f"{4 * GiB}\n", 4 * GiB),
        (f"{1 << 63}\n", 16 * GiB),
    ):
        limit.write_text(text)
        assert cpu_memory(meminfo, (missing, limit)) == expected
