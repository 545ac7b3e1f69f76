"""Requirements of services: programs, Python packages and disk space."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from ndif.launch.services.service import ServiceError

_INSTALL = {
    "redis-server": (
        "`apt-get install redis-server` (Debian, Ubuntu)",
        "`conda install -c conda-forge redis-server`",
        "`docker run -d -p 127.0.0.1:{port}:6379 redis:7 --appendonly yes`",
    ),
    "minio": (
        "`curl -o /usr/local/bin/minio https://dl.min.io/server/minio/release/linux-amd64/minio && "
        "chmod +x /usr/local/bin/minio` (Debian and Ubuntu have no package)",
        "`conda install -c conda-forge minio-server`",
        "`docker run -d -p 127.0.0.1:{port}:9000 -e MINIO_ROOT_USER=$NDIF_OBJECT_STORE_ACCESS_KEY "
        "-e MINIO_ROOT_PASSWORD=$NDIF_OBJECT_STORE_SECRET_KEY minio/minio server /data`",
    ),
}
_MIN_FREE = 0.05
"""Part of a disk that must be free."""


def require_program(*names: str, port: int) -> str:
    """Return the path of the first of these programs that is installed.

    Raises:
        ServiceError: If none is, with the commands that install it.
    """
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    debian, conda, container = (command.format(port=port) for command in _INSTALL[names[0]])
    raise ServiceError(
        f"{' or '.join(names)} is not installed. Install it with {debian} or {conda}, or run it in a "
        f"container: {container}."
    )


def require_package(name: str, variable: str) -> None:
    """Check that a Python package is installed, which `variable` needs.

    Raises:
        ServiceError: If it is not, with the command that installs it.
    """
    if find_spec(name) is None:
        raise ServiceError(
            f"{variable} needs the Python package {name}: run "
            f"`{sys.executable} -m pip install 'ndif[server]'`."
        )


def disk_space_problem(folder: Path, content: str, variable: str) -> str | None:
    """Return why `content` cannot be kept in `folder`, which need not exist; None if it can.

    `variable` is the setting that names the folder.
    """
    another = f"another folder with the variable {variable}."
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return f"{content} cannot be kept in {folder}: {nearest} is not writable. Choose {another}"
    disk = shutil.disk_usage(nearest)
    if disk.free < disk.total * _MIN_FREE:
        return (
            f"The disk of {folder} has {disk.free / 1e9:,.1f} GB free, less than {_MIN_FREE:.0%} of its "
            f"size: {content[0].lower()}{content[1:]} would soon fill it. Free some space, or "
            f"choose {another}"
        )
    return None
