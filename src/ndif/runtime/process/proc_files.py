"""Descriptors of /proc by which a confined process sees itself, where it can no longer open any."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ndif.sandbox.privileges import without_capabilities

_PRESENT, _SWAPPED, _OF_A_FILE, _EXCLUSIVE = 1 << 63, 1 << 62, 1 << 61, 1 << 56
"""Bits of /proc/PID/pagemap (kernel documentation, admin-guide/mm/pagemap)."""

_AT_ONCE = 1 << 18
"""Pages that are asked for in one call: the answer takes 2 MB."""

_RESET_PEAK = b"5"
_RESIDENT, _SHARED, _DATA = 1, 2, 5
"""Fields of /proc/PID/statm, in pages."""


@dataclass(frozen=True, slots=True)
class ProcFiles:
    """Files of this process's /proc, opened before it is confined and without privileges.

    Opened by a process with CAP_SYS_ADMIN, the page map would tell where in the machine's memory pages lie.
    """

    pagemap: int
    clear_refs: int
    statm: int
    tasks: int

    @classmethod
    def open(cls) -> ProcFiles:
        """Open them.

        Raises:
            OSError: if this machine has no such files.
        """
        with without_capabilities():
            return cls(
                os.open("/proc/self/pagemap", os.O_RDONLY),
                os.open("/proc/self/clear_refs", os.O_WRONLY),
                os.open("/proc/self/statm", os.O_RDONLY),
                os.open("/proc/self/task", os.O_RDONLY | os.O_DIRECTORY),
            )

    def own_pages(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """Tell of each page between two page boundaries whether it is this process's alone.

        Such a page is of no file, and no other process has it, too. Of a page that was swapped out nobody
        can say: it counts as one.
        """
        parts = [
            self._own_pages(at, min(_AT_ONCE, (end - at) // mmap.PAGESIZE))
            for at in range(start, end, _AT_ONCE * mmap.PAGESIZE)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.bool_)

    def _own_pages(self, start: int, count: int) -> npt.NDArray[np.bool_]:
        offset = start // mmap.PAGESIZE * 8
        entries = np.frombuffer(os.pread(self.pagemap, count * 8, offset), np.uint64)
        here = (entries & np.uint64(_PRESENT)) != 0
        exclusive = (entries & np.uint64(_EXCLUSIVE)) != 0
        of_a_file = (entries & np.uint64(_OF_A_FILE)) != 0
        swapped = (entries & np.uint64(_SWAPPED)) != 0
        own: npt.NDArray[np.bool_] = (here & exclusive & ~of_a_file) | swapped
        return own

    def reset_peak(self) -> None:
        """Begin to measure this process's peak anew (`memory.peak_bytes`)."""
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
        """Return the number of this process's threads, whoever started them."""
        os.lseek(self.tasks, 0, os.SEEK_SET)
        return sum(name.isdigit() for name in os.listdir(self.tasks))  # noqa: PTH208


def content(start: int, size: int) -> bytes:
    """Return a copy of memory of this process."""
    return ctypes.string_at(start, size)
