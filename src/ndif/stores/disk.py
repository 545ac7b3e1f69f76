"""The server's own disk: its free space, its files, and its errors in words for users."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from ndif.sizes import format_size

FULL = "the server's disk is full"
_MIN_FREE, _ENOUGH_FREE = 0.05, 20 * 10**9
"""Fraction of a disk that should be free, and the free bytes that suffice on any disk.

The bytes hold two of the largest results (8 GiB), and the requests until the oldest files expire. So a disk
of 8 TB for models need not have 400 GB free.
"""


def least_free(total: int) -> int:
    """Return the bytes that should be free on a disk of `total` bytes."""
    return min(int(total * _MIN_FREE), _ENOUGH_FREE)


def disk_problem(error: OSError) -> str:
    """Return a clause about a failure of the server's disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FULL
    return f"the server's disk failed ({error.strerror or error})"


def space_problem(folder: Path) -> str | None:
    """Return a sentence if too little of the disk of `folder` is free, else None."""
    disk = shutil.disk_usage(folder)
    if disk.free >= least_free(disk.total):
        return None
    free = (
        "is full"
        if disk.free == 0
        else f"has {format_size(disk.free)} of {format_size(disk.total)} free"
    )
    return (
        f"The disk of {folder} {free}: polled jobs, large requests and large results are refused while "
        "it is full."
    )


def nearest(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(nearest(folder)).free


def disk_usage(folder: Path) -> tuple[int, int] | None:
    """Return the free and total bytes of the disk of a folder; None if they cannot be read."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total


def has_no_writer(descriptor: int) -> bool:
    """Return True if no process can write any more to the file of `descriptor`, which is open to read only.

    The kernel grants a read lease only if no descriptor, mapping or message in transit has the file open
    for writing: fcntl(2), F_SETLEASE. On a file system without leases, return False.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def open_private(path: Path) -> IO[str]:
    """Open a file for writing; a new one is readable by this user only."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")


def sync(*paths: Path) -> None:
    """Flush files and folders to the disk, so that they survive a loss of power."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
