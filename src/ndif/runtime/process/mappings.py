"""What is mapped into a process, and which of its pages are its own (proc_pid_maps(5), pagemap)."""

from __future__ import annotations

import array
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PRESENT, _OF_A_FILE, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56
"""Bits of /proc/PID/pagemap (kernel documentation, admin-guide/mm/pagemap)."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    access: str
    offset: int
    """Where in the file it begins."""
    inode: int
    path: str

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


def mappings() -> Iterator[Mapping]:
    """This process's mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        yield Mapping(start, end, access, int(offset, 16), int(inode), path[0] if path else "")


def exclusive(pid: int) -> array.array[int]:
    """What `pid`, a fork of this process, no longer shares with it: addresses and lengths.

    Only of the mappings that both have.
    """
    ranges = array.array("Q")
    for mapping in mappings():
        if mapping.access.startswith("rw") and not mapping.path.startswith("[v"):
            _collect(
                ranges, pid, mapping, _PRESENT | _OF_A_FILE | _EXCLUSIVE, _PRESENT | _EXCLUSIVE
            )
    return ranges


def found(pid: int) -> array.array[int]:
    """What `pid`, a fork of this process, has read of files that both map: addresses and lengths."""
    ranges = array.array("Q")
    for mapping in mappings():
        if mapping.inode and mapping.access.startswith("r"):
            _collect(ranges, pid, mapping, _PRESENT | _OF_A_FILE, _PRESENT | _OF_A_FILE)
    return ranges


def written(mapping: Mapping) -> array.array[int]:
    """What this process wrote to of a private mapping of a file: addresses and lengths."""
    ranges = array.array("Q")
    _collect(ranges, "self", mapping, _PRESENT | _OF_A_FILE, _PRESENT)
    return ranges


def _collect(
    ranges: array.array[int], pid: int | str, mapping: Mapping, mask: int, wanted: int
) -> None:
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(mapping.start // mmap.PAGESIZE * 8)
        entries = array.array("Q", pagemap.read(mapping.size // mmap.PAGESIZE * 8))
    for number, entry in enumerate(entries):
        if entry & mask != wanted:
            continue
        address = mapping.start + number * mmap.PAGESIZE
        if ranges and ranges[-2] + ranges[-1] == address:
            ranges[-1] += mmap.PAGESIZE
        else:
            ranges.extend((address, mmap.PAGESIZE))
