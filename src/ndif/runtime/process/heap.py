"""The C library's heap before it is forked: without holes, in huge pages, with room at its top.

Imports and the loading of a model leave 20,000 holes in it. A fork that runs a request would spread what
it allocates over them, and copy a page for each: 9,700 with SmolLM2, where 3,800 are written to. And
what lies close together is found faster, by forks and by this process.
"""

from __future__ import annotations

import ctypes

from ndif.runtime.huge import COLLAPSE, SIZE, advise
from ndif.runtime.mappings import mappings

_LARGEST, _SMALLEST = 64 << 10, 32
"""Sizes of what the holes are filled with. A hole that is larger takes several."""

_ROOM = 32 << 20
"""What a request's own memory fits in, more or less; what nobody writes to takes none."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3). The values are the largest that the library itself would come to."""


class _Mallinfo(ctypes.Structure):
    """mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def settle() -> None:
    """Arrange this process's heap for the forks to come. Nothing of it moves.

    Where the C library is not glibc 2.33 or later, all is left as it is.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    libc.mallinfo2.restype = _Mallinfo
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_size_t
    libc.free.argtypes, libc.free.restype = [ctypes.c_size_t], None
    libc.sbrk.restype = ctypes.c_size_t
    libc.malloc_trim(0)
    _fill_holes(libc)
    top = _leave_room(libc)
    _use_huge_pages(top)


def _top(libc: ctypes.CDLL) -> int:
    """Where the heap's free end begins."""
    top: int = libc.sbrk(0) - libc.mallinfo2().keepcost
    return top


def _fill_holes(libc: ctypes.CDLL) -> None:
    size = _LARGEST
    while size >= _SMALLEST:
        top = _top(libc)
        while (address := libc.malloc(size)) < top:
            if not address:
                return
        libc.free(address)
        size = size * 3 // 4


def _leave_room(libc: ctypes.CDLL) -> int:
    """Extend the heap, and where its free end begins."""
    libc.mallopt(_MMAP_THRESHOLD, _ROOM)
    libc.mallopt(_TRIM_THRESHOLD, 2 * _ROOM)
    libc.free(libc.malloc(_ROOM - SIZE))
    return _top(libc)


def _use_huge_pages(top: int) -> None:
    """For what is there one by one, now; for the rest when it is first written to."""
    for mapping in mappings():
        if mapping.access == "rw-p" and mapping.path == "[heap]":
            advise(mapping.start, min(top, mapping.end), COLLAPSE)
            advise(top, mapping.end)
        elif mapping.access == "rw-p" and not mapping.path:
            advise(mapping.start, mapping.end, COLLAPSE)
