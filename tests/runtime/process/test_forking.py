"""Memory that is prefetched for a fork, measured by the page faults that it avoids.

Each measurement runs in a separate process, so that the test's process does not affect it.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ndif.runtime.process.forking import ForkPages, Rehearsal
from ndif.runtime.process.procfs import Mapping, mappings, written
from tests.runtime.apart import apart

pytestmark = pytest.mark.process

PAGES = 2000
SIZE = PAGES * mmap.PAGESIZE
FEW = 60
"""Page faults that an interpreter causes in any case."""


def faults(run: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def in_a_fork(run: Callable[[], object]) -> Any:
    """Return the result of `run` in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, json.dumps(run()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(content)


def memory(byte: int) -> mmap.mmap:
    """Return private memory filled with `byte`."""
    area = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    area.write(bytes([byte]) * SIZE)
    return area


def write(area: mmap.mmap, pages: range = range(PAGES)) -> None:
    for page in pages:
        area[page * mmap.PAGESIZE + 7] = 9


def read(area: mmap.mmap) -> int:
    return sum(area[page * mmap.PAGESIZE + 7] for page in range(PAGES))


def address(area: mmap.mmap) -> int:
    byte = ctypes.c_char.from_buffer(area)
    return ctypes.addressof(byte)


def covered(ranges: array.array[int], start: int, end: int) -> int:
    """Return how many bytes between two addresses are in `ranges`."""
    pairs = list(zip(ranges[::2], ranges[1::2], strict=True))
    return sum(max(0, min(end, at + size) - max(start, at)) for at, size in pairs)


def resident(area: mmap.mmap) -> int:
    """Return how many bytes of `area` are resident, without touching it."""
    start = f"{address(area):x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(start):
            break
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def digest(area: mmap.mmap) -> str:
    return hashlib.sha256(memoryview(area)).hexdigest()


# The measurements.


def copying() -> dict[str, Any]:
    written, left = memory(1), memory(2)
    pages = Rehearsal(lambda: write(written)).pages()
    before = [digest(written), digest(left)]

    def with_copies() -> dict[str, Any]:
        pages.fetch()
        same = [digest(written), digest(left)] == before
        return {"same": same, "faults": faults(lambda: write(written))}

    answer: dict[str, Any] = {
        "with": in_a_fork(with_copies),
        "without": in_a_fork(lambda: faults(lambda: write(written))),
        "mine": [digest(written), digest(left)] == before,
        "written": covered(pages.written, address(written), address(written) + SIZE),
        "left": covered(pages.written, address(left), address(left) + SIZE),
        "all": sum(pages.written[1::2]),
    }
    return answer


def finding_ranges() -> dict[str, Any]:
    area = memory(1)
    start = address(area)
    apart = [*range(10), *range(100, 120), 1999]

    def run() -> None:
        for page in apart:
            write(area, range(page, page + 1))

    def of(pages: ForkPages) -> list[tuple[int, int]]:
        """Return the first and the number of the pages in each range."""
        pairs = zip(pages.written[::2], pages.written[1::2], strict=True)
        # Memory behind the area may be written too, and may share a range with its last page.
        mine = [
            (at, min(size, start + SIZE - at)) for at, size in pairs if start <= at < start + SIZE
        ]
        return [((at - start) // mmap.PAGESIZE, size // mmap.PAGESIZE) for at, size in mine]

    pages = Rehearsal(run).pages()
    spare = range(start + 105 * mmap.PAGESIZE, start + 115 * mmap.PAGESIZE)
    return {
        "mine": of(pages),
        "but some": of(Rehearsal(run).pages(but=spare)),
        "aligned": all(value % mmap.PAGESIZE == 0 for value in pages.written),
        "ordered": [*pages.written[::2]] == sorted(pages.written[::2]),
    }


def failing() -> dict[str, Any]:
    area = memory(1)

    def run() -> None:
        write(area)
        raise SystemExit("as a rehearsal may")

    pages = Rehearsal(run).pages()
    pages.fetch()
    rehearsal = Rehearsal(lambda: write(area))
    rehearsal.socket.recv(1, socket.MSG_PEEK)
    os.kill(rehearsal._pid, signal.SIGKILL)
    os.waitpid(rehearsal._pid, 0)
    of_killed = rehearsal.pages()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        Rehearsal(lambda: None).pages()
    return {
        "ranges": [len(group.written) + len(group.read) for group in (pages, of_killed)],
        "same": area[7] == 1,
        "leaked": len(list(Path("/proc/self/fd").iterdir())) - descriptors,
    }


def gone() -> dict[str, Any]:
    """Measure memory that is written in the fork alone, and memory that was unmapped."""
    area = memory(1)
    pages = Rehearsal(lambda: write(area)).pages()
    start = address(area)
    area.close()
    kept: list[mmap.mmap] = []
    only_there = Rehearsal(lambda: kept.append(memory(3))).pages()

    def copy() -> bool:
        pages.fetch()
        only_there.fetch()
        return True

    return {"survived": in_a_fork(copy), "size": covered(pages.written, start, start + SIZE)}


def finding(file: str, other: str) -> dict[str, Any]:
    def mapped(path: str) -> mmap.mmap:
        with Path(path).open("rb") as opened:
            area = mmap.mmap(
                opened.fileno(),
                0,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        # A page of 2 MiB would be one fault.
        area.madvise(mmap.MADV_NOHUGEPAGE)
        return area

    weights, others = mapped(file), mapped(other)
    total = read(weights)
    read(others)
    without = in_a_fork(lambda: resident(weights))
    before = digest(weights)
    pages = Rehearsal(lambda: read(weights)).pages()

    def fork() -> dict[str, Any]:
        pages.fetch()
        return {
            "resident": resident(weights),
            "others": resident(others),
            "own": sum(written(of(weights))[1::2]),
            "faults": faults(lambda: read(weights)),
            "total": read(weights),
            "digest": digest(weights),
        }

    return {
        "without": without,
        "fork": in_a_fork(fork),
        "total": total,
        "before": before,
        "after": digest(weights),
    }


def of(area: mmap.mmap) -> Mapping:
    """Return the mapping of `area`."""
    return next(mapping for mapping in mappings() if mapping.start == address(area))


def measured(name: str, *arguments: Path) -> Any:
    return apart("tests.runtime.process.test_forking", name, *arguments)


# The tests.


def test_fork_with_prefetched_pages_writes_without_page_faults() -> None:
    values = measured("copying")
    assert values["without"] >= PAGES
    assert values["with"]["faults"] < FEW


def test_prefetched_pages_equal_originals() -> None:
    values = measured("copying")
    assert values["with"]["same"]
    assert values["mine"]


def test_pages_not_written_by_rehearsal_are_not_copied() -> None:
    values = measured("copying")
    assert values["written"] == SIZE
    assert values["left"] == 0
    # Pages that an interpreter writes in any case.
    assert values["all"] - SIZE < 16 << 20


def test_adjacent_written_pages_form_one_range() -> None:
    values = measured("finding_ranges")
    assert values["mine"] == [[0, 10], [100, 20], [1999, 1]]
    assert values["but some"] == [[0, 10], [100, 5], [115, 5], [1999, 1]]
    assert values["aligned"]
    assert values["ordered"]


def test_failed_rehearsal_yields_no_pages() -> None:
    values = measured("failing")
    assert values == {"ranges": [0, 0], "same": True, "leaked": 0}


def test_prefetch_skips_unmapped_memory() -> None:
    values = measured("gone")
    assert values == {"survived": True, "size": SIZE}


def test_fork_reads_mapped_weights_without_page_faults(tmp_path: Path) -> None:
    files = tmp_path / "weights", tmp_path / "others"
    for file in files:
        file.write_bytes(os.urandom(SIZE))
    values = measured("finding", *files)
    assert values["without"] == values["fork"]["others"] == 0
    assert values["fork"]["resident"] == SIZE
    assert values["fork"]["own"] == 0  # found, and not copied
    assert values["fork"]["faults"] < FEW
    expected = hashlib.sha256(files[0].read_bytes()).hexdigest()
    assert values["before"] == values["after"] == values["fork"]["digest"] == expected
    assert values["fork"]["total"] == values["total"]
    assert hashlib.sha256(files[0].read_bytes()).hexdigest() == expected


def test_mappings_parse_file_name_with_space(tmp_path: Path) -> None:
    file = tmp_path / "a model's weights"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as area,
    ):
        assert area[0] == 0
        (entry,) = [mapping for mapping in mappings() if mapping.path == str(file)]
    assert entry.access == "r--p"
    assert entry.end - entry.start == mmap.PAGESIZE


if __name__ == "__main__":
    PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
        run.__name__: run for run in (copying, finding_ranges, failing, gone, finding)
    }
    print(json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])))
