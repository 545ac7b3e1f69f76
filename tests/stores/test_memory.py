"""Available memory of a machine and of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndif.stores.memory import memory_is_short

GIB = 1 << 30


@pytest.mark.parametrize(
    ("available_kb", "limit", "used", "cache", "is_short"),
    [
        (1100, None, 0, 0, False),
        (900, None, 0, 0, True),
        (5000, "max", 9 * GIB, 0, False),
        (5000, 10 * GIB, 8 * GIB, 0, False),
        (5000, 10 * GIB, 9 * GIB + 1, 0, True),
        (5000, 10 * GIB, 10 * GIB, 2 * GIB, False),  # most of that is page cache
    ],
)
def test_memory_is_short_below_tenth_available(
    available_kb: int,
    limit: int | str | None,
    used: int,
    cache: int,
    is_short: bool,
    tmp_path: Path,
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 10000 kB\nMemAvailable: {available_kb} kB\nHugePages_Total: 0\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {cache - 1}\ninactive_file 1\n")
    assert memory_is_short(meminfo, tmp_path) is is_short
    memory_is_short()  # this machine's files have that form


@pytest.mark.parametrize(("used", "is_short"), [(8 * GIB, False), (10 * GIB, True)])
def test_memory_is_short_in_cgroup_v1_container(
    used: int,
    is_short: bool,
    tmp_path: Path,
) -> None:
    meminfo, folder = tmp_path / "meminfo", tmp_path / "memory"
    meminfo.write_text("MemTotal: 10000 kB\nMemAvailable: 9000 kB\n")
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{10 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("total_active_file 5\ntotal_inactive_file 6\n")
    assert memory_is_short(meminfo, tmp_path) is is_short
