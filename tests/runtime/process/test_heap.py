"""The heap of a process that forks: measured in separate processes, by the pages that a fork writes."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndif.runtime.process import heap
from ndif.runtime.process.forking import Rehearsal
from ndif.runtime.process.procfs import mappings
from tests.runtime.apart import apart

pytestmark = pytest.mark.process

HOLES, HOLE = 20_000, 700
PAGE = 4096

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_size_t
_libc.free.argtypes, _libc.free.restype = [ctypes.c_size_t], None


def with_holes() -> list[int]:
    """Free every other piece of a heap; return the addresses of the rest, each filled with its number."""
    pieces = [_libc.malloc(HOLE) for _ in range(2 * HOLES)]
    for number, piece in enumerate(pieces):
        ctypes.memset(piece, number % 251, HOLE)
    for piece in pieces[::2]:
        _libc.free(piece)
    return pieces[1::2]


def in_holes(count: int) -> Callable[[], None]:
    """Return a function that works like a request: it allocates memory and writes to it."""

    def run() -> None:
        for piece in [_libc.malloc(HOLE - 50) for _ in range(count)]:
            ctypes.memset(piece, 7, HOLE - 50)

    return run


def copied(run: Callable[[], None], until: int) -> int:
    """Return how many heap pages below `until` are copied by a fork that calls `run`."""
    ranges = Rehearsal(run).pages().written
    mapping = next(m for m in mappings() if m.path == "[heap]")
    return sum(
        size // PAGE
        for at, size in zip(ranges[::2], ranges[1::2], strict=True)
        if mapping.start <= at < until
    )


def measure() -> dict[str, Any]:
    pieces = with_holes()
    end = max(pieces)
    gc.collect()
    before = copied(in_holes(HOLES // 2), end)
    spare = heap.settle()
    after = copied(in_holes(HOLES // 2), end)
    same = all(
        ctypes.string_at(piece, HOLE) == bytes([(2 * number + 1) % 251]) * HOLE
        for number, piece in enumerate(pieces)
    )
    large = _libc.malloc(heap._FREE_TOP // 2)
    ctypes.memset(large, 1, heap._FREE_TOP // 2)
    return {
        "before": before,
        "after": after,
        "same": same,
        "huge": huge(),
        "beside": large > end,
        "spare": [large <= spare.start < large + heap._FREE_TOP // 2, len(spare)],
    }


def huge() -> int:
    """Return how many bytes of this process are in huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def test_fork_of_settled_heap_allocates_contiguously_not_from_holes() -> None:
    values = apart("tests.runtime.process.test_heap")
    # Before settling, the fork copies a page for every few holes.
    assert values["before"] > HOLES // 2 * HOLE // PAGE // 2
    assert values["after"] < values["before"] // 10
    # Memory in use was not touched and remains usable.
    assert values["same"]
    assert values["beside"]
    # A fork need not fetch the top of the heap, except its first part.
    behind, spare = values["spare"]
    assert behind
    assert heap._FREE_TOP // 2 < spare < heap._FREE_TOP
    # Memory that a request takes from the top is in huge pages.
    assert values["huge"] >= 8 << 20


if __name__ == "__main__":
    print(json.dumps(measure()))
