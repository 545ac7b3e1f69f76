"""Rotation of logs that processes keep open."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ndif.launch.log_rotation import rotate, rotate_all
from tests.stores.small_disk import fill, small_disk

pytestmark = pytest.mark.process

__all__ = ["small_disk"]

WRITER = """
import sys
for line in sys.stdin:
    sys.stdout.write(line)
    sys.stdout.flush()
    sys.stderr.write(".")
    sys.stderr.flush()
"""


def test_open_writers_continue_into_rotated_log(tmp_path: Path) -> None:
    log = tmp_path / "api" / "output.log"
    log.parent.mkdir()
    ours = logging.FileHandler(log)
    with log.open("ab") as file:
        program = subprocess.Popen(
            [sys.executable, "-c", WRITER],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.PIPE,
        )
    assert program.stdin is not None
    assert program.stderr is not None
    for number in range(5):
        program.stdin.write(f"program {number}\n".encode())
        program.stdin.flush()
        assert program.stderr.read(1) == b"."
        ours.emit(logging.makeLogRecord({"msg": f"server {number}"}))
        rotate(log, kept=3)
    program.communicate()
    ours.close()
    assert log.read_text() == ""
    for part, number in ((1, 4), (2, 3), (3, 2)):
        assert log.with_name(f"output.log.{part}").read_text() == (
            f"program {number}\nserver {number}\n"
        )
    assert len([*log.parent.iterdir()]) == 4


def test_only_large_logs_are_rotated(tmp_path: Path) -> None:
    for name, size in (("api", 99), ("broker", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "output.log").write_bytes(bytes(size))
    rotate_all(tmp_path, 100, kept=0)
    sizes = {path.parent.name: path.stat().st_size for path in tmp_path.glob("*/*")}
    assert sizes == {"api": 99, "broker": 0}


def test_full_disk_keeps_earlier_log_parts(small_disk: Path) -> None:
    log = small_disk / "output.log"
    log.write_bytes(b"new" * (1 << 16))
    log.with_name("output.log.1").write_text("old")
    filling = fill(small_disk)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            rotate(log, kept=2)
    assert log.with_name("output.log.1").read_text() == "old"
    assert log.stat().st_size == 3 << 16
    assert not log.with_name("output.log.2").exists()
    filling.unlink()
    rotate(log, kept=2)
    assert log.with_name("output.log.1").stat().st_size == 3 << 16
    assert log.with_name("output.log.2").read_text() == "old"
    assert sorted(path.name for path in small_disk.iterdir()) == [
        *("output.log", "output.log.1", "output.log.2")
    ]
