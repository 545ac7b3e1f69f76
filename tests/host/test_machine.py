"""What this machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.on_loop import on_loop

from ndif.host import machine

GiB = 1 << 30


def test_its_memory_is_what_the_system_says() -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.cpu_memory() <= whole


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
        assert machine.cpu_memory(meminfo, (missing, limit)) == expected


@on_loop
async def test_gpus_are_what_the_driver_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await machine.gpus() == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559\necho 24564\n")
    tool.chmod(0o755)
    assert await machine.gpus() == (81559 << 20, 24564 << 20)
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert await machine.gpus() == ()
