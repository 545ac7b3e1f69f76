"""A disk so small that a test can fill it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.services.packages import go_without


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        go_without("this user mounts no disks")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk to its last byte; return the file to delete."""
    with closing((disk / "filling").open("wb", buffering=0)) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return disk / "filling"
