"""Weights in huge pages that every process of a model shares.

With small ones a fork pays for each: 66,000 for 270 MB, and 4 million for 16 GB, each to be found by
every runner anew. Few file systems keep files in huge pages; memory that belongs to no file but can be
mapped by many (memfd_create(2)) can be made so, from Linux 6.1 on.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from ndif.runtime.frames import Channel
from ndif.runtime.mappings import Mapping, mappings, written

SIZE = 2 << 20
"""Bytes of a huge page. Where a machine's are larger, madvise refuses, and small ones stay."""

COLLAPSE, _HUGEPAGE = 25, 14
"""Advice to madvise(2): at once; and where a page is first touched."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FIXED = 0x10
_SHARED = "/memfd:weights"
"""What the memory is called that a host makes (see `ndif.host.weights`)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [
    ctypes.c_size_t,
    ctypes.c_size_t,
    *[ctypes.c_int] * 3,
    ctypes.c_long,
]


def advise(start: int, end: int, advice: int = _HUGEPAGE) -> bool:
    """Ask for huge pages between two addresses; whether the kernel has them, or will."""
    start, end = -(-start // SIZE) * SIZE, end // SIZE * SIZE
    return end > start and not _libc.madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice
    )


def weights_of(folder: Path) -> list[Mapping]:
    """What is mapped here of the files of a checkpoint, for tensors to lie in."""
    files = {file.resolve() for file in folder.rglob("*")}
    return [
        mapping
        for mapping in mappings()
        if mapping.access == "rw-p" and mapping.inode and Path(mapping.path) in files
    ]


def share(weights: Sequence[Mapping], control: Channel) -> None:
    """Have `weights` from memory that the host hands to each process of the same ones.

    Nothing else may run in this process meanwhile. What it wrote to them stays its own.
    """
    for mapping in weights:
        name = _name(mapping)
        if name is None:
            continue
        control.send({"kind": "weights", "name": name, "size": mapping.size})
        header, _, fds = control.receive()
        if not fds:
            continue
        own = _own_pages(mapping)
        usable = bool(header["filled"])
        if not usable:
            usable = _fill(mapping, fds[0])
            control.send({"kind": "filled", "name": name, "usable": usable})
        if usable:
            _map(mapping, mmap.MAP_PRIVATE, fds[0], _shift(mapping))
        for at, content in own:
            ctypes.memmove(at, content, len(content))
        os.close(fds[0])


def shared() -> list[Mapping]:
    """What is mapped here of such memory."""
    return [mapping for mapping in mappings() if mapping.path.startswith(_SHARED)]


def _name(mapping: Mapping) -> str | None:
    """What two processes call the same weights; None if their file is gone."""
    try:
        file = Path(mapping.path).stat()
    except OSError:
        return None
    if file.st_ino != mapping.inode:
        return None
    numbers = (file.st_dev, file.st_ino, file.st_mtime_ns, mapping.offset, mapping.size)
    return ":".join(map(str, (*numbers, _shift(mapping))))


def _shift(mapping: Mapping) -> int:
    """How far behind the memory's beginning the weights lie, for huge pages to fall together."""
    return mapping.start % SIZE


def _own_pages(mapping: Mapping) -> list[tuple[int, bytes]]:
    """What this process wrote to its weights after it mapped them."""
    ranges = iter(written(mapping))
    return [(at, ctypes.string_at(at, size)) for at, size in zip(ranges, ranges, strict=True)]


def _fill(mapping: Mapping, fd: int) -> bool:
    """Put the weights into the memory, for good; False where this kernel has no huge pages for it."""
    with Path(mapping.path).open("rb", buffering=0) as file:
        os.ftruncate(fd, _shift(mapping) + mapping.size)
        _map(mapping, mmap.MAP_SHARED, fd, _shift(mapping))
        for address in range(mapping.start, mapping.end, SIZE):
            # What is all a hole the kernel takes for something that was cut off.
            ctypes.memset(address, 0, 1)
        huge = advise(mapping.start, mapping.end, COLLAPSE)
        if huge:
            file.seek(mapping.offset)
            memory = memoryview((ctypes.c_char * mapping.size).from_address(mapping.start)).cast(
                "B"
            )
            while memory and (count := file.readinto(memory)):
                memory = memory[count:]
        _map(mapping, mmap.MAP_PRIVATE, file.fileno(), mapping.offset)
    if huge:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    else:
        os.ftruncate(fd, 0)  # what came of it takes no memory
    return huge


def _map(mapping: Mapping, flags: int, fd: int, offset: int) -> None:
    """Put a file in the place of what is mapped there.

    Raises:
        OSError: if it cannot be.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    at = _libc.mmap(mapping.start, mapping.size, access, flags | _MAP_FIXED, fd, offset)
    if at != mapping.start:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
