"""Preparation of the C library's heap for forks: holes filled, and free space at its top.

Imports and the loading of a model leave 20,000 holes in the heap. A fork that runs a request would spread
its allocations over them and copy a page for each: 9,700 pages with SmolLM2, where it writes to 3,800.
Memory that lies close together is also faster to access, for forks and for this process. What a fork server
shares with this process stays shared: to move memory in use into huge pages took 0.6 s and 130 MB a model,
and made no fork faster.

Memory that a request maps has small pages: where memory is fragmented, the kernel makes room for each huge
one, which took 0.6 s for a result of 256 MB.
"""

from __future__ import annotations

import ctypes

from ndif.runtime.process.proc_files import mappings
from ndif.runtime.weights.huge_pages import SIZE, advise

_LARGEST, _SMALLEST = 64 << 10, 32
"""Sizes in bytes of the allocations that fill holes. A larger hole takes several."""

_FREE_TOP = 32 << 20
"""Bytes at the heap's top that hold most requests' memory; pages that nobody writes to take none."""
KEPT_TOP = 8 << 20
"""Bytes of them that a process holds while it waits for a request."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3). The values are the largest that the library itself would come to."""


class _Mallinfo(ctypes.Structure):
    """mallinfo(3), of which the last field is read: the free bytes at the heap's top."""

    _fields_ = [(f"other{number}", ctypes.c_size_t) for number in range(9)]
    _fields_ += [("keepcost", ctypes.c_size_t)]


_libc = ctypes.CDLL(None)
# Bound at once: a process under the policy for untrusted code loads no library.
_TELLS_TOP = hasattr(_libc, "mallinfo2")  # from glibc 2.33 on
_TRIMS = hasattr(_libc, "malloc_trim")
if _TELLS_TOP:
    _libc.mallinfo2.restype = _Mallinfo
    _libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_size_t
    _libc.free.argtypes, _libc.free.restype = [ctypes.c_size_t], None
    _libc.sbrk.restype = ctypes.c_size_t
if _TRIMS:
    _libc.malloc_trim.argtypes = [ctypes.c_size_t]


def settle() -> range:
    """Prepare this process's heap for later forks, and return the addresses that they need not fetch.

    No allocation moves.
    """
    if not _TELLS_TOP:
        return range(0)
    _libc.malloc_trim(0)
    _fill_holes()
    # Extend the heap, of which the end is free.
    _libc.mallopt(_MMAP_THRESHOLD, _FREE_TOP)
    _libc.mallopt(_TRIM_THRESHOLD, 2 * _FREE_TOP)
    _libc.free(_libc.malloc(_FREE_TOP - SIZE))
    for mapping in mappings():
        if mapping.access == "rw-p" and mapping.path == "[heap]":
            advise(_top(), mapping.end)  # huge pages at the first write
    return _spare()


def trim(keep: int = 0) -> None:
    """Give free memory back to the system, but for `keep` bytes at the heap's top."""
    if _TRIMS:
        _libc.malloc_trim(keep)


def _spare() -> range:
    # A part of a huge page takes all of it.
    return range((_top() + KEPT_TOP) // SIZE * SIZE, _libc.sbrk(0))


def _top() -> int:
    """Return the address at which the heap's free end begins."""
    top: int = _libc.sbrk(0) - _libc.mallinfo2().keepcost
    return top


def _fill_holes() -> None:
    size = _LARGEST
    while size >= _SMALLEST:
        top = _top()
        while (address := _libc.malloc(size)) < top:
            if not address:
                return
        _libc.free(address)
        size = size * 3 // 4
