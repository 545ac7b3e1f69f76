"""Weights in huge pages that all processes of a model share.

With small pages, every runner maps each page anew: 66,000 pages for 270 MB, and 4 million for 16 GB. Few
file systems keep files in huge pages. An anonymous file in memory (memfd_create(2)) can have huge pages
from Linux 6.1 on, and many processes can map it.
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

from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import Filled, SharedMemory, ShareWeights
from ndif.runtime.process.procfs import Mapping, mappings, written

SIZE = 2 << 20
"""Bytes of a huge page. On a machine with larger ones, madvise fails and the pages stay small."""

_COLLAPSE, _HUGEPAGE = 25, 14
"""Advice of madvise(2): create huge pages at once, or on first access."""

_MAX_PARTS = 8
"""Most parts of the weights that are copied at once: more would only wait for memory bandwidth."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FIXED = 0x10
_SHARED = "/memfd:weights"
"""The path in /proc/PID/maps of memory from the host (`ndif.host.shared_weights`)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [*[ctypes.c_size_t] * 2, *[ctypes.c_int] * 3, ctypes.c_long]


def advise(start: int, end: int, advice: int = _HUGEPAGE) -> bool:
    """Request huge pages between two addresses; return True if the kernel accepts."""
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


def share(weights: Sequence[Mapping], control: FrameChannel) -> None:
    """Remap `weights` to memory that the host provides for all processes with the same weights.

    No other thread of this process may run during the call. Pages that this process has written to keep
    their contents.
    """
    for mapping in weights:
        name = _name(mapping)
        if name is None:
            continue
        control.send(ShareWeights(name, mapping.size))
        memory, _, fds = control.expect(SharedMemory)
        if not fds:
            continue
        # Addresses and contents of the pages that this process has written to.
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
    """Return this process's mappings of memory from the host."""
    return [mapping for mapping in mappings() if mapping.path.startswith(_SHARED)]


def _name(mapping: Mapping) -> str | None:
    """Return a name that all processes with these weights agree on; None if the file was replaced."""
    try:
        file = Path(mapping.path).stat()
    except OSError:
        return None
    if file.st_ino != mapping.inode:
        return None
    numbers = (file.st_dev, file.st_ino, file.st_mtime_ns, mapping.offset, mapping.size)
    return ":".join(map(str, (*numbers, _shift(mapping))))


def _shift(mapping: Mapping) -> int:
    """Return the offset of the weights in the memory, chosen so that huge pages of both are aligned."""
    return mapping.start % SIZE


def _fill(mapping: Mapping, fd: int) -> bool:
    """Copy the weights into the memory and seal it; return False if the kernel provides no huge pages."""
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
        os.ftruncate(fd, 0)  # frees the memory
    return huge


def _parts(mapping: Mapping) -> Iterator[tuple[int, int]]:
    """Yield the bounds of parts of a mapping, one per CPU, each with at least one huge page."""
    first, last = -(-mapping.start // SIZE), mapping.end // SIZE
    count = max(1, min(len(os.sched_getaffinity(0)), _MAX_PARTS, last - first))
    cuts = [(first + (last - first) * part // count) * SIZE for part in range(1, count)]
    return pairwise((mapping.start, *cuts, mapping.end))


def _fill_part(mapping: Mapping, start: int, end: int) -> bool:
    """Read a part of the weights into huge pages; return False if the kernel provides none."""
    for address in range(start, end, SIZE):
        # Touched first: the kernel treats a range without any page as a truncated file.
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
    """Map a file in place of a mapping."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    at = _libc.mmap(mapping.start, mapping.size, access, flags | _MAP_FIXED, fd, offset)
    if at != mapping.start:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
