"""A service that this machine runs: its requirements, and the start and stop of its program."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ndif.config.reference import name_of
from ndif.distribution import install_command
from ndif.errors import NdifError
from ndif.hostname import is_loopback
from ndif.launch.run_folder import RunFolder, failed_start
from ndif.server.supervised import ProcessSpec, Supervisor
from ndif.sizes import format_size
from ndif.stores.disk import least_free, nearest

_CONNECT_TIMEOUT_S = 1.0
_INSTALL = {
    "redis-server": (
        "`apt-get install redis-server` or `apt-get install valkey-server` (Debian, Ubuntu)",
        "`conda install -c conda-forge redis-server`",
        "`docker run -d -p 127.0.0.1:{port}:6379 redis:7 --appendonly yes`",
    ),
    # MinIO no longer publishes programs or images; these two sources still have it.
    "minio": (
        "`conda install -c conda-forge minio-server` (Debian and Ubuntu have no package)",
        "`docker run -d -p 127.0.0.1:{port}:9000 -e MINIO_ROOT_USER=$NDIF_OBJECT_STORE_ACCESS_KEY "
        "-e MINIO_ROOT_PASSWORD=$NDIF_OBJECT_STORE_SECRET_KEY quay.io/minio/minio server /data`",
    ),
}
REAPER = "ndif.launch.services.reaper"
"""Module that runs each service's program; its first argument is the service's name."""
_SECRETS = frozenset(
    name_of(field)
    for field in (
        *("cluster_secret", "database_url", "postgres_password"),
        # NDIF_LOKI_URL is not among them, because the replicas of a node log to it.
        *("influxdb_url", "influxdb_token", "otlp_url"),
    )
)
_REAPER_S = 10.0
"""Seconds that the reaper has, in addition to the program's, to stop the program's children."""


class ServiceError(NdifError):
    """A service cannot be used, or does not answer and cannot be started; the message names a remedy."""


@dataclass(frozen=True)
class Program:
    """The program of a service."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to the environment of this process."""


@dataclass(frozen=True)
class Service:
    """A service that starts before the server and stops after it."""

    name: str
    """Name on the command line, in `ndif start` and `ndif logs`."""
    address: str
    """Address as its variable gives it, without secrets."""
    host: str
    port: int
    program: Callable[[RunFolder], Awaitable[Program]]
    """Writes the program's configuration into the run folder and returns the program."""
    answers: Callable[[RunFolder], bool]
    """Returns True once the service can be used."""
    start_timeout_s: float = 60
    stop_grace_s: float = 20
    """Seconds between SIGTERM and SIGKILL of the program."""
    joins: bool = False
    """True for a node that joins an existing cluster."""

    async def start(self, supervisor: Supervisor, run_folder: RunFolder) -> None:
        """Start the service and return once it answers, or raise a ServiceError with the end of its log."""
        program = await self.program(run_folder)
        log = run_folder.log(self.name)
        log.parent.mkdir(parents=True, exist_ok=True)

        reaper = (sys.executable, "-m", REAPER)
        grace_s = str(self.stop_grace_s)
        process = ProcessSpec(
            self.name,
            lambda parent_pipe: [*reaper, self.name, str(parent_pipe), grace_s, *program.command],
            log,
            must_start=True,
            stop_timeout_s=self.stop_grace_s + _REAPER_S,
            environment={**without_secrets(os.environ), **program.environment},
        )
        try:
            await supervisor.start(
                [process], lambda: self.answers(run_folder), self.start_timeout_s
            )
        except (RuntimeError, asyncio.TimeoutError) as error:
            raise ServiceError(failed_start(f"The {self.name} at {self.address}", log)) from error


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the secrets of gateways, which neither services nor replicas need."""
    return {name: value for name, value in variables.items() if name.upper() not in _SECRETS}


def accepts_connections(host: str, port: int) -> bool:
    """Return True if something listens at the address."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def is_local(host: str) -> bool:
    """Return True if the address is one of this machine's own."""
    if is_loopback(host):
        return True
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in addresses:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
    except OSError:
        return False
    return bool(addresses)


def require_program(*names: str, port: int) -> str:
    """Return the path of the first installed program; raise a ServiceError on how to install one."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    for name in names:
        if executable := shutil.which(name, path=path):
            return executable
    *packages, container = (command.format(port=port) for command in _INSTALL[names[0]])
    raise ServiceError(
        f"{' or '.join(names)} is not installed. Install it with {' or '.join(packages)}, or run it in a "
        f"container: {container}."
    )


def require_package(name: str, variable: str) -> None:
    """Raise a ServiceError unless the Python package that `variable` needs is installed."""
    if find_spec(name) is None:
        raise ServiceError(
            f"{variable} needs the Python package {name}: run `{install_command(name)}`."
        )


def disk_space_problem(folder: Path, content: str, variable: str) -> str | None:
    """Return why `content` cannot be kept in `folder`, which need not exist; None if it can.

    `variable` is the setting that names the folder.
    """
    choice = f"another folder with the variable {variable}."
    existing = nearest(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return f"{content} cannot be kept in {folder}: {existing} is not writable. Choose {choice}"
    disk = shutil.disk_usage(existing)
    if disk.free < (least := least_free(disk.total)):
        return (
            f"The disk of {folder} has {format_size(disk.free)} free, less than {format_size(least)}: "
            f"{content[0].lower()}{content[1:]} would soon fill it. Free some space, or choose {choice}"
        )
    return None
