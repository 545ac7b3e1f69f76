"""The Ray cluster at `NDIF_RAY_ADDRESS`: a head that this machine runs there, or a node that joins it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from ndif.config.groups import ClusterSettings
from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.host.environment import machine_name
from ndif.hostname import is_loopback, numeric
from ndif.launch.cluster_secret import VARIABLE as SECRET
from ndif.launch.cluster_secret import cluster_secrets, ensure_cluster_secrets
from ndif.launch.run_folder import RunFolder
from ndif.launch.services.service import (
    Program,
    Service,
    ServiceError,
    accepts_connections,
    disk_space_problem,
    is_local,
    require_package,
)
from ndif.stores.broker.signing import derive

NAME = "ray"
_VARIABLE = name_of("ray_address")
_FOLDER = name_of("ray_temp_dir")
_PORT = 6379
_CLIENT = "ray"
_READY_LINE = "Ray runtime started."
_OBJECT_STORE_BYTES = 128 << 20
"""Size of Ray's object store, near Ray's minimum: this server passes no objects through it."""
_MAX_SOCKET_PATH = 107
_SOCKET_PATH = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1"
# `ray start --block` polls once a second and gives its children some seconds to stop.
_STOP_GRACE_S = 25
_MODE, _TOKENS = "RAY_AUTH_MODE", ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_PROBE_S = 30.0


def ray_head(options: Settings, *, may_start: bool, leads: bool = False) -> Service | None:
    """Return the head of a cluster to start; None if one answers already or none is configured.

    Ray connects the leader only to a node on the leader's machine. With `leads`, a machine that uses a
    remote head and has no node gets a node without resources for models.
    """
    address = options.ray_address
    if not address:
        return None
    require_package("ray", _VARIABLE)
    if address == "auto":
        return None  # Ray itself finds the cluster
    scheme, host, port = _parts(address)
    if accepts_connections(host, port):
        authentication(options, starts=False)
        if not leads or scheme == _CLIENT or is_local(host) or _has_node():
            return None
        own_address = _address_towards(host, port)
        return _service(
            options,
            host,
            port,
            own_address,
            (_address_option(host, port),),
            is_head=False,
            has_resources=False,
        )
    no_answer = f"Nothing answers at {address} ({_VARIABLE})."
    if scheme == _CLIENT or not is_local(host):
        raise ServiceError(f"{no_answer} Start the cluster's head there, or name another.")
    if not may_start:
        raise ServiceError(
            f"{no_answer} `ndif start ray` starts a head there, and so does `ndif start`."
        )
    arguments = (f"--port={port}", "--include-dashboard=false")
    return _service(options, host, port, _own_ip(host), ("--head", *arguments), is_head=True)


def own_head(options: ClusterSettings) -> str | None:
    """Return the address of the head to start if the options name a Ray Client server on this machine.

    Return None for any other address, or if something answers there.
    """
    address = options.ray_address
    if not address.startswith(f"{_CLIENT}://"):
        return None
    _, host, port = _parts(address)
    if not is_loopback(host) or accepts_connections(host, port):
        return None
    head, broker = options.ray_head_port, urlsplit(options.broker_url)
    broker_port = (broker.port or _PORT) if options.broker_url else 0
    return f"{numeric(host)}:{head + (head == broker_port)}"


def ray_worker(options: Settings) -> Service:
    """Return a node that joins the cluster; raise a ServiceError if there is no cluster."""
    require_package("ray", _VARIABLE)
    address = options.ray_address
    if address == "auto" or "://" in address:
        raise ServiceError(
            f"A worker joins a cluster at the address of its head: set {_VARIABLE} to HOST:PORT (the "
            f"--port of `ray start`, {_PORT} by default), not to {address}."
        )
    _, host, port = _parts(address)
    if not accepts_connections(host, port):
        raise ServiceError(
            f"Nothing answers at {address} ({_VARIABLE}). Start the head there (`ndif start`, or "
            "`ndif start ray`), and check that no firewall is in between."
        )
    authentication(options, starts=False)
    # Unless the head is on this machine, Ray chooses the address by which the other nodes reach it.
    own_address = numeric(host) if is_loopback(host) else None
    return _service(options, host, port, own_address, (_address_option(host, port),), is_head=False)


def _address_option(host: str, port: int) -> str:
    return f"--address={numeric(host)}:{port}"


def _address_towards(host: str, port: int) -> str | None:
    """Return this machine's address on the route to a host; None if Ray has to choose one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _has_node() -> bool:
    """Return True if a node of a Ray cluster runs on this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path((folder / "cmdline").read_text().partition("\0")[0]).name == "raylet":
                return True
    return False


def authentication(options: Settings, *, starts: bool) -> Mapping[str, str]:
    """Return the environment variables that authenticate a process of this machine to the cluster.

    A head that `ndif` starts requires a token, which is derived from the cluster's secret. Ray's own
    variables override this. A running cluster is tried without a token, then with each known one; raise a
    ServiceError if it accepts none.
    """
    address = options.ray_address
    if not address or address == "auto" or _MODE in os.environ:
        return {}
    if starts:
        if any(name in os.environ for name in _TOKENS):
            return {_MODE: "token"}
        return _with_token(ensure_cluster_secrets(options)[0])
    if _parts(address)[0] == _CLIENT:
        return {}
    return _accepted_variables(address, cluster_secrets(options))


@lru_cache(maxsize=8)
def _accepted_variables(address: str, secrets: tuple[str, ...]) -> Mapping[str, str]:
    has_own = any(name in os.environ for name in _TOKENS) or _ray_token_file().exists()
    candidates = [{_MODE: "disabled"}, *([{_MODE: "token"}] if has_own else [])]
    for variables in [*candidates, *map(_with_token, secrets)]:
        is_accepted = _accepts(address, variables)
        if is_accepted is None:
            return {}  # the leader retries until there is a cluster
        if is_accepted:
            return variables
    raise ServiceError(
        f"The Ray cluster at {address} ({_VARIABLE}) does not admit this machine, which has no token for "
        f"it. If `ndif start` started its head, set {SECRET} to the secret of that machine; else set "
        f"{_TOKENS[0]}."
    )


def _ray_token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _with_token(secret: str) -> dict[str, str]:
    return {_MODE: "token", _TOKENS[0]: derive(secret, "ray").hex()}


def _accepts(address: str, variables: Mapping[str, str]) -> bool | None:
    """Return True if a head accepts these variables, False if it refuses them, None if none answers."""
    _, host, port = _parts(address)
    command = (sys.executable, "-m", "ray.scripts.scripts", "health-check")
    try:
        result = subprocess.run(  # noqa: S603 - our own interpreter
            [*command, "--address", f"{numeric(host)}:{port}", "--skip-version-check"],
            env={**os.environ, **variables},
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if result.returncode == 0:
        return True
    return False if b"AuthenticationError" in result.stderr else None


def _service(
    options: Settings,
    host: str,
    port: int,
    ip: str | None,
    arguments: Sequence[str],
    *,
    is_head: bool,
    has_resources: bool = True,
) -> Service:
    folder = _checked_folder(options)

    async def make(_: RunFolder) -> Program:
        from ndif.cluster.fleet import inspect_machine
        from ndif.cluster.ray.cluster import HEAD, declaration
        from ndif.host.gpus import Driver

        resources: dict[str, int] = dict(HEAD) if is_head else {}
        if has_resources:
            driver = Driver()
            machine = await inspect_machine(options, driver)
            await driver.close()
            resources |= declaration(machine.node.resources)
        variables = authentication(options, starts=is_head)
        return Program(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                "--disable-usage-stats",
                f"--node-name={machine_name()}",
                *((f"--node-ip-address={ip}",) if ip else ()),
                # Replicas need custom resources; Ray would start a process for each CPU that is named here.
                *("--num-cpus=1", "--num-gpus=0", f"--object-store-memory={_OBJECT_STORE_BYTES}"),
                *("--include-log-monitor=false", f"--temp-dir={folder}"),
                f"--resources={json.dumps(resources)}",
                *arguments,
            ],
            {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1", **variables},
        )

    return Service(
        NAME,
        options.ray_address,
        host,
        port,
        make,
        has_started,
        start_timeout_s=90,
        stop_grace_s=_STOP_GRACE_S,
        joins=not is_head,
    )


def has_started(session: RunFolder) -> bool:
    """Return True once the log of a run says that its Ray node has joined the cluster."""
    try:
        return _READY_LINE in session.log(NAME).read_text(errors="replace")
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
            f"{address} is no address of a Ray cluster: set {_VARIABLE} to HOST:PORT."
        )
    return parts.scheme, parts.hostname, port


def _own_ip(host: str) -> str:
    """Return the address of a host name, because Ray accepts no name for a node that it starts."""
    try:
        return numeric(host) if is_loopback(host) else socket.gethostbyname(host)
    except OSError:
        return host


def _checked_folder(options: ClusterSettings) -> Path:
    folder = options.ray_temp_dir.expanduser().absolute()
    problem = disk_space_problem(folder, "Ray's files", _FOLDER)
    if problem is not None:
        raise ServiceError(problem)
    length = len(os.fsencode(folder)) + len(_SOCKET_PATH)
    if length > _MAX_SOCKET_PATH:
        raise ServiceError(
            f"{folder} is {length - _MAX_SOCKET_PATH} bytes too long: a socket of Ray below it would "
            f"have a path of more than {_MAX_SOCKET_PATH} bytes. Choose another folder with the "
            f"variable {_FOLDER}."
        )
    return folder
