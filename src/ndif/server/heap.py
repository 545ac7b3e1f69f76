"""The heap of a process through which payloads and results pass."""

from __future__ import annotations

import ctypes
import threading
import time

_MMAP_THRESHOLD = -3
"""Parameter of mallopt(3)."""
_LARGE = 1 << 20
_INTERVAL_S = 10.0


def return_free_memory() -> None:
    """Make the C library return freed memory to the system, if it has `malloc_trim`.

    By default, the library keeps blocks of up to 32 MiB once a block of that size was freed, and all free
    memory between small blocks in use. After many clients have sent requests and not read responses, that
    memory is hundreds of megabytes.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # musl has none, and needs none
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        threading.Thread(target=_trim, args=(libc,), name="trim", daemon=True).start()


def _trim(libc: ctypes.CDLL) -> None:
    while True:
        time.sleep(_INTERVAL_S)
        libc.malloc_trim(0)
