"""Preparation of the C library's heap for forks: its holes are filled, and its top has free space.

Imports and the loading of a model leave 20,000 holes in the heap. A fork that runs a request would spread
its allocations over them and copy a page for each: 9,700 pages with SmolLM2 instead of 3,800. Compact
memory is also faster to access, for forks and for this process.

Two things are deliberately not done. Moving used memory into huge pages would end the sharing with the fork
server; it took 0.6 s and 130 MB per model, and made no fork faster. Memory that a request maps keeps small
pages: on fragmented memory the kernel compacts for each huge page, which took 0.6 s for a 256 MB result.
"""

from __future__ import annotations

import ctypes

from ndif.runtime.process.procfs import mappings
from ndif.runtime.weights.huge_pages import SIZE, advise

_LARGEST, _SMALLEST = 64 << 10, 32
"""Sizes in bytes of the allocations that fill holes. Several of them fill a larger hole."""

_FREE_TOP = 32 << 20
"""Free bytes at the heap's top, enough for most requests; untouched pages take no memory."""
KEPT_TOP = 8 << 20
"""Bytes of `_FREE_TOP` that a process keeps while it waits for a request."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3). The values set are the maxima of glibc's own dynamic adjustment."""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3); `keepcost` is the number of free bytes at the heap's top."""

    _fields_ = [(f"other{number}", ctypes.c_size_t) for number in range(9)]
    _fields_ += [("keepcost", ctypes.c_size_t)]


_libc = ctypes.CDLL(None)
# Bound at import: a process under the policy for untrusted code cannot load a library.
_HAS_MALLINFO = hasattr(_libc, "mallinfo2")  # from glibc 2.33 on
_HAS_TRIM = hasattr(_libc, "malloc_trim")
if _HAS_MALLINFO:
    _libc.mallinfo2.restype = _Mallinfo
    _libc.malloc.argtypes, _libc.malloc.restype = [ctypes.c_size_t], ctypes.c_size_t
    _libc.free.argtypes, _libc.free.restype = [ctypes.c_size_t], None
    _libc.sbrk.restype = ctypes.c_size_t
if _HAS_TRIM:
    _libc.malloc_trim.argtypes = [ctypes.c_size_t]


def settle() -> range:
    """Prepare this process's heap for forks, in place; return addresses that forks need not prefetch."""
    if not _HAS_MALLINFO:
        return range(0)
    _libc.malloc_trim(0)
    _fill_holes()
    # Extend the heap by a free end.
    _libc.mallopt(_MMAP_THRESHOLD, _FREE_TOP)
    _libc.mallopt(_TRIM_THRESHOLD, 2 * _FREE_TOP)
    _libc.free(_libc.malloc(_FREE_TOP - SIZE))
    for mapping in mappings():
        if mapping.access == "rw-p" and mapping.path == "[heap]":
            advise(_top(), mapping.end)  # huge pages at the first write
    return _unused_addresses()


def trim(keep: int = 0) -> None:
    """Return free memory to the system, except for `keep` bytes at the heap's top."""
    if _HAS_TRIM:
        _libc.malloc_trim(keep)


def _unused_addresses() -> range:
    # Rounded down: a huge page is populated as a whole.
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
