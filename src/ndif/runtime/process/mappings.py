"""The memory mappings of a process, and the pages that belong to it alone (proc_pid_maps(5), pagemap)."""

from __future__ import annotations

import array
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


def exclusive(pid: int) -> array.array[int]:
    """Return the memory that `pid`, a fork of this process, no longer shares with it.

    Returns:
        Addresses and lengths, within the mappings that both processes have.
    """
    ranges = array.array("Q")
    for mapping in mappings():
        if mapping.access.startswith("rw") and not mapping.path.startswith("[v"):
            _collect(ranges, pid, mapping, PRESENT | OF_A_FILE | EXCLUSIVE, PRESENT | EXCLUSIVE)
    return ranges


def found(pid: int) -> array.array[int]:
    """Return the pages of files that `pid`, a fork of this process, has read: addresses and lengths."""
    ranges = array.array("Q")
    for mapping in mappings():
        if mapping.inode and mapping.access.startswith("r"):
            _collect(ranges, pid, mapping, PRESENT | OF_A_FILE, PRESENT | OF_A_FILE)
    return ranges


def written(mapping: Mapping) -> array.array[int]:
    """Return the pages of a private file mapping that this process wrote to: addresses and lengths."""
    ranges = array.array("Q")
    _collect(ranges, "self", mapping, PRESENT | OF_A_FILE, PRESENT)
    return ranges


def _collect(
    ranges: array.array[int], pid: int | str, mapping: Mapping, mask: int, expected: int
) -> None:
    """Add the pages of `mapping` whose entries have the `expected` bits within `mask`."""
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(mapping.start // mmap.PAGESIZE * 8)
        entries = array.array("Q", pagemap.read(mapping.size // mmap.PAGESIZE * 8))
    for number, entry in enumerate(entries):
        if entry & mask != expected:
            continue
        address = mapping.start + number * mmap.PAGESIZE
        if ranges and ranges[-2] + ranges[-1] == address:
            ranges[-1] += mmap.PAGESIZE
        else:
            ranges.extend((address, mmap.PAGESIZE))
