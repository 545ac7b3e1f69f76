"""The server's own disk: why it does not take something, in words that a user may read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = "the server's disk is full"


def disk_problem(error: OSError) -> str:
    """Return the clause that says why the disk of this server did not do as it was told."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FULL
    return f"the server's disk failed ({error.strerror or error})"


def sync(*paths: Path) -> None:
    """Write files and folders through to the disk, so that they outlive a loss of power."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
