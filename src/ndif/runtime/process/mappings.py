"""The memory mappings of a process, and the pages that belong to it alone (proc_pid_maps(5), pagemap)."""

from __future__ import annotations

import array
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PRESENT, SWAPPED, OF_A_FILE, EXCLUSIVE = 1 << 63, 1 << 62, 1 << 61, 1 << 56
"""Bits of an entry of /proc/PID/pagemap (kernel documentation, admin-guide/mm/pagemap)."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    access: str
    offset: int
    """Bytes of the file before the mapping's start."""
    inode: int
    path: str

    @property
    def size(self) -> int:
        """Return the bytes of the mapping."""
        return self.end - self.start


def mappings() -> Iterator[Mapping]:
    """Yield this process's mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        yield Mapping(start, end, access, int(offset, 16), int(inode), path[0] if path else "")


def entries(pagemap: int, start: int, end: int) -> npt.NDArray[np.uint64]:
    """Return the entries of an open page map for the pages between two page boundaries."""
    size = (end - start) // mmap.PAGESIZE * 8
    return np.frombuffer(os.pread(pagemap, size, start // mmap.PAGESIZE * 8), np.uint64)


def are(found: npt.NDArray[np.uint64], expected: int, mask: int) -> npt.NDArray[np.bool_]:
    """Return for each entry whether it has the `expected` bits within `mask`."""
    matching: npt.NDArray[np.bool_] = (found & np.uint64(mask)) == np.uint64(expected)
    return matching


def exclusive(pid: int) -> array.array[int]:
    """Return the memory that `pid`, a fork of this process, no longer shares with it."""
    own = (each for each in mappings() if each.access[:2] == "rw" and each.path[:2] != "[v")
    return _pages(pid, own, PRESENT | EXCLUSIVE, PRESENT | OF_A_FILE | EXCLUSIVE)


def found(pid: int) -> array.array[int]:
    """Return the pages of files that `pid`, a fork of this process, has read."""
    files = (each for each in mappings() if each.inode and each.access.startswith("r"))
    return _pages(pid, files, PRESENT | OF_A_FILE, PRESENT | OF_A_FILE)


def written(mapping: Mapping) -> array.array[int]:
    """Return the pages of a private file mapping that this process wrote to."""
    return _pages("self", [mapping], PRESENT, PRESENT | OF_A_FILE)


def _pages(pid: int | str, of: Iterable[Mapping], expected: int, mask: int) -> array.array[int]:
    """Return the addresses and lengths of the pages that have the `expected` bits within `mask`."""
    ranges = array.array("Q")
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for mapping in of:
            matching = are(entries(pagemap.fileno(), mapping.start, mapping.end), expected, mask)
            for page in matching.nonzero()[0].tolist():
                address = mapping.start + page * mmap.PAGESIZE
                if ranges and ranges[-2] + ranges[-1] == address:
                    ranges[-1] += mmap.PAGESIZE
                else:
                    ranges.extend((address, mmap.PAGESIZE))
    return ranges
