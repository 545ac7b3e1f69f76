"""How to have the programs that services are."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec

from ndif.services.service import ServiceError

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


def program(*names: str, port: int) -> str:
    """Where the first of these is that there is.

    Raises:
        ServiceError: with the commands that install it.
    """
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    debian, conda, container = (line.format(port=port) for line in _INSTALL[names[0]])
    raise ServiceError(
        f"{' or '.join(names)} is not installed: {debian}, or {conda}; or have it in a "
        f"container, {container}."
    )


def library(name: str, purpose: str) -> None:
    """See that a package of Python is there.

    Raises:
        ServiceError: with the command that installs it.
    """
    if find_spec(name) is None:
        raise ServiceError(
            f"{purpose} needs the Python package {name}: run "
            f"`{sys.executable} -m pip install 'ndif[server]'`."
        )
