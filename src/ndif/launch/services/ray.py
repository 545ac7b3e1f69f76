"""Ray: the cluster at `NDIF_RAY_ADDRESS`, a head of our own on this machine, and a node that joins one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ndif.cluster.ray_nodes import HEAD, declaration
from ndif.config import Settings
from ndif.gateway.origin import is_loopback
from ndif.host import machine
from ndif.services.missing import library
from ndif.services.room import lack_of_room
from ndif.services.service import Program, Service, ServiceError, is_here, is_taken
from ndif.session.folder import Session
from ndif.variables import name_of

NAME = "ray"
_VARIABLE = name_of("ray_address")
_FOLDER = name_of("ray_temp_dir")
_PORT = 6379
_CLIENT = "ray"
_STARTED = "Ray runtime started."
_OBJECTS = 128 << 20
"""Nothing of ours goes through Ray's object store: this is near the least that Ray takes."""
_LONGEST_SOCKET = 107
_A_SOCKET = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"
# `ray start --block` looks once a second, and gives what it has started some seconds to end.
_ENDS_WITHIN_S = 25


def ray_head(options: Settings, *, may_start: bool) -> Service | None:
    """What is to be started so that there is a cluster; None where there is one, or none is wanted.

    Raises:
        ServiceError: if there is none and there can be none.
    """
    address = options.ray_address
    if not address:
        return None
    library("ray", _VARIABLE)
    if address == "auto":
        return None  # what it means is for Ray to find
    scheme, host, port = _parts(address)
    if is_taken(host, port):
        return None
    if scheme == _CLIENT or not is_here(host):
        raise ServiceError(
            f"Nothing answers at {address} ({_VARIABLE}). Start the cluster's head there, or name another."
        )
    if not may_start:
        raise ServiceError(
            f"Nothing answers at {address} ({_VARIABLE}). `ndif start ray` starts a head there, and so "
            "does `ndif start`."
        )
    _see_room(options)

    async def make(_: Session) -> Program:
        what = ("--head", f"--port={port}", "--include-dashboard=false")
        return await _node(options, _ip(host), HEAD, what)

    return _service(address, host, port, make)


def ray_worker(options: Settings) -> Service:
    """A node that joins the cluster.

    Raises:
        ServiceError: if there is none that it could join.
    """
    library("ray", _VARIABLE)
    address = options.ray_address
    if address == "auto" or "://" in address:
        raise ServiceError(
            f"A worker joins a cluster at the address of its head: {_VARIABLE} is to be HOST:PORT "
            f"(ray start's --port, {_PORT} by default), not {address}."
        )
    _, host, port = _parts(address)
    if not is_taken(host, port):
        raise ServiceError(
            f"Nothing answers at {address} ({_VARIABLE}). Start the head there (`ndif start`, or "
            "`ndif start ray`), and see that no firewall is between."
        )
    _see_room(options)

    async def make(_: Session) -> Program:
        # Which of its addresses others reach is for Ray to find, where that is not this machine alone.
        own = _ip(host) if is_loopback(host) else None
        return await _node(options, own, {}, (f"--address={_ip(host)}:{port}",))

    return _service(address, host, port, make)


def _service(
    address: str, host: str, port: int, make: Callable[[Session], Awaitable[Program]]
) -> Service:
    return Service(
        NAME,
        address,
        host,
        port,
        make,
        _has_started,
        comes_up_within_s=90,
        ends_within_s=_ENDS_WITHIN_S,
    )


async def _node(
    options: Settings, ip: str | None, beside: Mapping[str, int], what: Sequence[str]
) -> Program:
    from ndif.cluster.fleet import look
    from ndif.host.gpus import Driver

    driver = Driver()
    looked = await look(options, driver)
    await driver.close()
    resources = {**declaration(looked.node.resources), **beside}
    return Program(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            "--disable-usage-stats",
            f"--node-name={machine.name()}",
            *((f"--node-ip-address={ip}",) if ip else ()),
            # Ray places nothing of ours by these, and would start a process for each CPU.
            *("--num-cpus=1", "--num-gpus=0", f"--object-store-memory={_OBJECTS}"),
            *("--include-log-monitor=false", f"--temp-dir={_folder(options)}"),
            f"--resources={json.dumps(resources)}",
            *what,
        ],
        {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"},
    )


def _has_started(session: Session) -> bool:
    try:
        return _STARTED in session.log(NAME).read_text(errors="replace")
    except OSError:
        return False


def _parts(address: str) -> tuple[str, str, int]:
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = parts.port or (10001 if parts.scheme == _CLIENT else _PORT)
    except ValueError:
        port = 0
    if not parts.hostname or not port or parts.scheme not in ("", _CLIENT):
        raise ServiceError(
            f"{address} is no address of a Ray cluster ({_VARIABLE}): it is HOST:PORT."
        )
    return parts.scheme, parts.hostname, port


def _ip(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def _folder(options: Settings) -> Path:
    return options.ray_temp_dir.expanduser().absolute()


def _see_room(options: Settings) -> None:
    folder = _folder(options)
    problem = lack_of_room(folder, "What Ray writes", _FOLDER)
    if problem is not None:
        raise ServiceError(problem)
    length = len(os.fsencode(folder)) + len(_A_SOCKET)
    if length > _LONGEST_SOCKET:
        raise ServiceError(
            f"{folder} is {length - _LONGEST_SOCKET} bytes too long for the sockets that Ray has below it "
            f"({_LONGEST_SOCKET} altogether). Choose another folder with the variable {_FOLDER}."
        )
