"""Weights in huge pages that all processes of a model share.

With small pages a fork pays for each: 66,000 for 270 MB and 4 million for 16 GB, which every runner maps
anew. Few file systems keep files in huge pages. An anonymous file in memory (memfd_create(2)) can have
them from Linux 6.1 on, and many processes can map it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from ndif.runtime.frames import Channel
from ndif.runtime.messages import Filled, SharedMemory, ShareWeights
from ndif.runtime.process.proc_files import Mapping, mappings, written

SIZE = 2 << 20
"""Bytes of a huge page. Where a machine's are larger, madvise fails and the pages stay small."""

_COLLAPSE, _HUGEPAGE = 25, 14
"""Advice to madvise(2): make huge pages at once, or where a page is first touched."""

_MOST_PARTS = 8
"""Parts of the weights that are copied at the same time, at most: more of them wait for the memory."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FIXED = 0x10
_SHARED = "/memfd:weights"
"""The path in /proc/PID/maps of memory that the host creates (`ndif.host.shared_weights`)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [*[ctypes.c_size_t] * 2, *[ctypes.c_int] * 3, ctypes.c_long]


def advise(start: int, end: int, advice: int = _HUGEPAGE) -> bool:
    """Ask for huge pages between two addresses; return True if the kernel provides them."""
    start, end = -(-start // SIZE) * SIZE, end // SIZE * SIZE
    size = ctypes.c_size_t(max(0, end - start))
    return end > start and not _libc.madvise(ctypes.c_void_p(start), size, advice)


def weights_of(folder: Path) -> list[Mapping]:
    """Return this process's private, writable mappings of a checkpoint's files."""
    files = {os.path.realpath(file) for file in folder.rglob("*")}
    return [
        mapping
        for mapping in mappings()
        if mapping.access == "rw-p" and mapping.inode and mapping.path in files
    ]


def share(weights: Sequence[Mapping], control: Channel) -> None:
    """Map `weights` from memory that the host gives to each process with the same weights.

    No other thread may run meanwhile, but those that copy. Pages that this process wrote to keep their
    contents.
    """
    for mapping in weights:
        name = _name(mapping)
        if name is None:
            continue
        control.send(ShareWeights(name, mapping.size))
        memory, _, fds = control.expect(SharedMemory)
        if not fds:
            continue
        # Pages that this process wrote to: addresses and contents.
        ranges = iter(written(mapping))
        own = [(at, ctypes.string_at(at, size)) for at, size in zip(ranges, ranges, strict=True)]
        usable = memory.filled
        if not usable:
            usable = _fill(mapping, fds[0])
            control.send(Filled(name, usable))
        if usable:
            _map(mapping, mmap.MAP_PRIVATE, fds[0], _shift(mapping))
        for at, content in own:
            ctypes.memmove(at, content, len(content))
        os.close(fds[0])


def shared() -> list[Mapping]:
    """Return this process's mappings of the memory that the host gave."""
    return [mapping for mapping in mappings() if mapping.path.startswith(_SHARED)]


def _name(mapping: Mapping) -> str | None:
    """Return a name that is the same in all processes with these weights; None if their file is gone."""
    try:
        file = Path(mapping.path).stat()
    except OSError:
        return None
    if file.st_ino != mapping.inode:
        return None
    numbers = (file.st_dev, file.st_ino, file.st_mtime_ns, mapping.offset, mapping.size)
    return ":".join(map(str, (*numbers, _shift(mapping))))


def _shift(mapping: Mapping) -> int:
    """Return the weights' offset in the memory that aligns its huge pages with those of the mapping."""
    return mapping.start % SIZE


def _fill(mapping: Mapping, fd: int) -> bool:
    """Copy the weights into the memory and seal it; return False if the kernel has no huge pages for it."""
    with Path(mapping.path).open("rb", buffering=0) as file:
        os.ftruncate(fd, _shift(mapping) + mapping.size)
        _map(mapping, mmap.MAP_SHARED, fd, _shift(mapping))
        with ThreadPoolExecutor() as threads:
            fills = [
                threads.submit(_fill_part, mapping, start, end) for start, end in _parts(mapping)
            ]
        huge = all(fill.result() for fill in fills)
        _map(mapping, mmap.MAP_PRIVATE, file.fileno(), mapping.offset)
    if huge:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    else:
        os.ftruncate(fd, 0)  # the unused memory is freed
    return huge


def _parts(mapping: Mapping) -> Iterator[tuple[int, int]]:
    """Yield the addresses of parts of a mapping, one a CPU, each with a huge page at least."""
    first, last = -(-mapping.start // SIZE), mapping.end // SIZE
    count = max(1, min(len(os.sched_getaffinity(0)), _MOST_PARTS, last - first))
    cuts = [(first + (last - first) * part // count) * SIZE for part in range(1, count)]
    return pairwise((mapping.start, *cuts, mapping.end))


def _fill_part(mapping: Mapping, start: int, end: int) -> bool:
    """Read a part of the weights into huge pages; return False if the kernel has none for it."""
    for address in range(start, end, SIZE):
        # The kernel takes a range without any page for a truncated file.
        ctypes.memset(address, 0, 1)
    if not advise(start, end, _COLLAPSE):
        return False
    raw = (ctypes.c_char * (end - start)).from_address(start)
    memory = memoryview(raw).cast("B")
    with Path(mapping.path).open("rb", buffering=0) as file:
        file.seek(mapping.offset + start - mapping.start)
        while memory and (count := file.readinto(memory)):
            memory = memory[count:]
    return True


def _map(mapping: Mapping, flags: int, fd: int, offset: int) -> None:
    """Replace a mapping by a file."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    at = _libc.mmap(mapping.start, mapping.size, access, flags | _MAP_FIXED, fd, offset)
    if at != mapping.start:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
