"""The server's own disk: why it does not take something, in words that a user may read."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

from ndif.sizes import format_size

FULL = "the server's disk is full"
_MIN_FREE, _MOST_FREE = 0.05, 20 * 10**9
"""Fraction of a disk that should be free, and the bytes that suffice on any.

These hold two of the largest results (8 GiB), and the requests that come until the oldest files expire: a
disk of 8 TB for models need not have 400 GB free for them.
"""


def least_free(total: int) -> int:
    """Return the bytes that should be free on a disk of `total` bytes."""
    return min(int(total * _MIN_FREE), _MOST_FREE)


def disk_problem(error: OSError) -> str:
    """Return the clause that says why the disk of this server did not do as it was told."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FULL
    return f"the server's disk failed ({error.strerror or error})"


def space_problem(folder: Path) -> str | None:
    """Return the sentence that little of the disk of `folder` is free; None if enough is."""
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


def half_of_free(folder: Path) -> int:
    """Return half of the bytes that are free on the disk of a folder, which need not be there yet."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free // 2


def has_no_writer(descriptor: int) -> bool:
    """Return True if no process can write to a file any more, which `descriptor` has open to read alone.

    The kernel gives a lease to read a file only if that is open for writing nowhere, nor mapped, nor on its
    way in a message: fcntl(2), F_SETLEASE. Where a file system has no leases, this is False.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def sync(*paths: Path) -> None:
    """Write files and folders through to the disk, so that they outlive a loss of power."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
