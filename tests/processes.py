"""Processes and their descendants, from /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.templates.stand_in import FOR


def children(pid: int) -> list[int]:
    """Return the children of a process's first thread; for a stand-in, the children of its fork."""
    pid = _served_by(pid)
    return _numbers(Path(f"/proc/{pid}/task/{pid}/children"))


def family(pid: int) -> Iterator[int]:
    """Yield a process and all its living descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{_served_by(pid)}/task").iterdir():
            for child in _numbers(thread / "children"):
                yield from family(child)


def _served_by(pid: int) -> int:
    name = Path(f"/proc/{pid}/comm").read_text()
    return int(name.removeprefix(FOR)) if name.startswith(FOR) else pid


def _numbers(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]
