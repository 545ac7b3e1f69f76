"""Measurements of a process's own memory and threads through /proc.

A confined process can open no file of /proc. It reads descriptors that were opened before.
"""

from __future__ import annotations

import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ndif.runtime.process.mappings import EXCLUSIVE, OF_A_FILE, PRESENT, SWAPPED, are, entries
from ndif.sandbox.confinement.limits import without_capabilities

_BYTES_PER_READ = (1 << 18) * mmap.PAGESIZE
"""Memory whose entries one call reads: 2 MB of them."""

_RESET_PEAK = b"5"
_RESIDENT, _SHARED, _DATA = 1, 2, 5
"""Fields of /proc/PID/statm, in pages."""
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ProcFiles:
    """Files of this process's /proc, opened before it is confined and without privileges.

    A page map that a process with CAP_SYS_ADMIN opened would tell where pages lie in physical memory.
    """

    pagemap: int
    clear_refs: int
    statm: int
    tasks: int

    @classmethod
    def open(cls) -> ProcFiles:
        """Open the files."""
        with without_capabilities():
            return cls(
                os.open("/proc/self/pagemap", os.O_RDONLY),
                os.open("/proc/self/clear_refs", os.O_WRONLY),
                os.open("/proc/self/statm", os.O_RDONLY),
                os.open("/proc/self/task", os.O_RDONLY | os.O_DIRECTORY),
            )

    def own_pages(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """Return for each page between two page boundaries whether it belongs to this process alone.

        Such a page belongs to no file and to no other process. The page map does not say whether a
        swapped-out page is shared: it counts as this process's own.
        """
        parts = [np.empty(0, np.bool_)]
        for at in range(start, end, _BYTES_PER_READ):
            found = entries(self.pagemap, at, min(at + _BYTES_PER_READ, end))
            own = are(found, PRESENT | EXCLUSIVE, PRESENT | OF_A_FILE | EXCLUSIVE)
            parts.append(own | are(found, SWAPPED, SWAPPED))
        return np.concatenate(parts)

    def reset_peak(self) -> None:
        """Begin to measure this process's peak of resident memory anew (see `peak_bytes`)."""
        os.write(self.clear_refs, _RESET_PEAK)

    def data_bytes(self) -> int:
        """Return the private writable memory, as RLIMIT_DATA counts it, with the stack."""
        return self._statm()[_DATA] * mmap.PAGESIZE

    def anonymous_bytes(self) -> int:
        """Return the resident memory that belongs to no file."""
        fields = self._statm()
        return (fields[_RESIDENT] - fields[_SHARED]) * mmap.PAGESIZE

    def _statm(self) -> list[int]:
        return [int(field) for field in os.pread(self.statm, 200, 0).split()]

    def threads(self) -> int:
        """Return the number of this process's threads, with those of native libraries."""
        os.lseek(self.tasks, 0, os.SEEK_SET)
        return sum(name.isdigit() for name in os.listdir(self.tasks))  # noqa: PTH208


def reset_peak() -> None:
    """Begin to measure the peak of resident memory anew, in a process that may open /proc."""
    Path("/proc/self/clear_refs").write_bytes(_RESET_PEAK)


def peak_bytes() -> int:
    """Return the peak of this process's resident memory since the last reset."""
    # A confined process cannot read the peak from /proc.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
