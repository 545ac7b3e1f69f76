"""The memory and threads of a process, from /proc (proc_pid_maps(5), pagemap, statm).

A confined process cannot open files in /proc. It reads descriptors that were opened before.
"""

from __future__ import annotations

import array
import mmap
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ndif.sandbox.confinement.limits import without_capabilities

_PRESENT, _SWAPPED, _OF_A_FILE, _EXCLUSIVE = 1 << 63, 1 << 62, 1 << 61, 1 << 56
"""Bits of an entry of /proc/PID/pagemap (kernel documentation, admin-guide/mm/pagemap)."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    access: str
    offset: int
    """Offset in the file of the mapping's start, in bytes."""
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


def _entries(pagemap: int, start: int, end: int) -> npt.NDArray[np.uint64]:
    """Return the page map entries of the pages between two page boundaries."""
    size = (end - start) // mmap.PAGESIZE * 8
    return np.frombuffer(os.pread(pagemap, size, start // mmap.PAGESIZE * 8), np.uint64)


def _match(entries: npt.NDArray[np.uint64], expected: int, mask: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries whose bits within `mask` are the `expected` ones."""
    matching: npt.NDArray[np.bool_] = (entries & np.uint64(mask)) == np.uint64(expected)
    return matching


def exclusive(pid: int) -> array.array[int]:
    """Return the private memory of `pid`, a fork of this process, as addresses and lengths."""
    own = (
        mapping for mapping in mappings() if mapping.access[:2] == "rw" and mapping.path[:2] != "[v"
    )
    return _pages(pid, own, _PRESENT | _EXCLUSIVE, _PRESENT | _OF_A_FILE | _EXCLUSIVE)


def read_pages(pid: int) -> array.array[int]:
    """Return the pages of files that `pid`, a fork of this process, has read, as addresses and lengths."""
    files = (mapping for mapping in mappings() if mapping.inode and mapping.access.startswith("r"))
    return _pages(pid, files, _PRESENT | _OF_A_FILE, _PRESENT | _OF_A_FILE)


def written(mapping: Mapping) -> array.array[int]:
    """Return the written pages of a private file mapping of this process, as addresses and lengths."""
    return _pages("self", [mapping], _PRESENT, _PRESENT | _OF_A_FILE)


def _pages(
    pid: int | str, regions: Iterable[Mapping], expected: int, mask: int
) -> array.array[int]:
    """Return addresses and lengths of the pages whose entry bits within `mask` are the `expected` ones."""
    ranges = array.array("Q")
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for mapping in regions:
            matching = _match(
                _entries(pagemap.fileno(), mapping.start, mapping.end), expected, mask
            )
            for page in matching.nonzero()[0].tolist():
                address = mapping.start + page * mmap.PAGESIZE
                if ranges and ranges[-2] + ranges[-1] == address:
                    ranges[-1] += mmap.PAGESIZE
                else:
                    ranges.extend((address, mmap.PAGESIZE))
    return ranges


_BYTES_PER_READ = (1 << 18) * mmap.PAGESIZE
"""Memory whose page map entries one call reads: 2 MB of entries."""

_RESET_PEAK = b"5"
_RESIDENT, _SHARED, _DATA = 1, 2, 5
"""Fields of /proc/PID/statm, in pages."""
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ProcFiles:
    """Files of this process in /proc, opened before confinement and without privileges.

    Opened with CAP_SYS_ADMIN, a page map would show physical addresses.
    """

    pagemap: int
    clear_refs: int
    statm: int
    tasks: int

    @classmethod
    def open(cls, clear_refs: int | None = None) -> ProcFiles:
        """Open the files; `clear_refs` is its descriptor if the host has opened it for this process."""
        with without_capabilities():
            if clear_refs is None:
                clear_refs = os.open("/proc/self/clear_refs", os.O_WRONLY)
            return cls(
                os.open("/proc/self/pagemap", os.O_RDONLY),
                clear_refs,
                os.open("/proc/self/statm", os.O_RDONLY),
                os.open("/proc/self/task", os.O_RDONLY | os.O_DIRECTORY),
            )

    def own_pages(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the pages between two page boundaries that are private to this process.

        A private page belongs to no file and no other process. The page map does not show whether a
        swapped-out page is shared, so such a page counts as private.
        """
        parts = [np.empty(0, np.bool_)]
        for at in range(start, end, _BYTES_PER_READ):
            entries = _entries(self.pagemap, at, min(at + _BYTES_PER_READ, end))
            own = _match(entries, _PRESENT | _EXCLUSIVE, _PRESENT | _OF_A_FILE | _EXCLUSIVE)
            parts.append(own | _match(entries, _SWAPPED, _SWAPPED))
        return np.concatenate(parts)

    def reset_peak(self) -> None:
        """Reset this process's peak of resident memory (see `peak_bytes`)."""
        os.write(self.clear_refs, _RESET_PEAK)

    def data_bytes(self) -> int:
        """Return the bytes of private writable memory, as RLIMIT_DATA counts it, plus the stack."""
        return self._statm()[_DATA] * mmap.PAGESIZE

    def anonymous_bytes(self) -> int:
        """Return the bytes of resident memory that belong to no file."""
        fields = self._statm()
        return (fields[_RESIDENT] - fields[_SHARED]) * mmap.PAGESIZE

    def _statm(self) -> list[int]:
        return [int(field) for field in os.pread(self.statm, 200, 0).split()]

    def threads(self) -> int:
        """Return the number of this process's threads, including threads of native libraries."""
        os.lseek(self.tasks, 0, os.SEEK_SET)
        return sum(name.isdigit() for name in os.listdir(self.tasks))  # noqa: PTH208


def reset_peak() -> None:
    """Reset the peak of resident memory, in a process that may open /proc."""
    Path("/proc/self/clear_refs").write_bytes(_RESET_PEAK)


def peak_bytes() -> int:
    """Return the peak of this process's resident memory since the last reset, in bytes."""
    # A confined process cannot read the peak from /proc.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
