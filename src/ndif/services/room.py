"""A folder that is to be written to: whether it can be, and has room."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_LEAST_FREE = 0.05


def lack_of_room(folder: Path, what: str, variable: str) -> str | None:
    """What is in the way of keeping `what` there; the folder itself is not made yet.

    `variable` is the one that names another.
    """
    another = f"another folder with the variable {variable}."
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return (
            f"{what} cannot be kept in {folder}: {nearest} cannot be written to. Choose {another}"
        )
    disk = shutil.disk_usage(nearest)
    if disk.free < disk.total * _LEAST_FREE:
        return (
            f"The disk of {folder} is full but for {disk.free / 1e9:,.1f} GB, less than "
            f"{_LEAST_FREE:.0%} of it: {what[0].lower()}{what[1:]} would soon find no room. Make room, or "
            f"choose {another}"
        )
    return None
