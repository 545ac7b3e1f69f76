"""Servers on this machine whose jobs do nothing: this project's, an empty route, and Ray Serve's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import httpx
from tests.services.process import free_port

from bench.profiles import drawn
from bench.servers.machine import Machine
from bench.servers.processes import ROOT
from ndif.stores.accounts.port import tier_with
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry

_READY_S = 120.0
_USERS = 10
# The limits are active as by default, but no load reaches them.
_LIMITS = {
    "requests_per_minute": 10**8,
    "unfinished_jobs": 10**6,
    "queue_depth": 10**6,
    "channels": 10**5,
}


@contextlib.contextmanager
def no_op_machine(environment: Mapping[str, str], models: int = 1) -> Iterator[Machine]:
    """Run `bench.servers.control`; yield it once its models are loaded."""
    with tempfile.TemporaryDirectory(prefix="bench-") as root:
        database = f"sqlite:///{root}/accounts.sqlite"
        keys = asyncio.run(_make_keys(database))
        port = free_port()
        variables = {
            **environment,
            "NDIF_SESSION_ROOT": root,
            "NDIF_DATABASE_URL": database,
            "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
            "NDIF_MAX_CHANNELS_PER_ADDRESS": "100000",
        }
        command = ["bench.servers.control", root, str(port), str(models)]
        is_ready = partial(runs, port, models)
        with running(command, variables, is_ready) as process, drawn(process.pid):
            yield Machine(f"http://127.0.0.1:{port}", process.pid, keys, Path(root))


@contextlib.contextmanager
def empty_route() -> Iterator[tuple[int, int]]:
    """Run `bench.servers.empty`; yield its port and its process."""
    port = free_port()
    with running(["bench.servers.empty", str(port)], {}, lambda: _answers(port)) as process:
        yield port, process.pid


@contextlib.contextmanager
def ray_serve() -> Iterator[tuple[int, int]]:
    """Run `bench.servers.ray_serve`; yield its port and its process."""
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        port = free_port()
        command = ["bench.servers.ray_serve", folder, str(port)]
        with running(command, {}, lambda: _answers(port)) as process:
            yield port, process.pid


@contextlib.contextmanager
def running(
    command: list[str],
    variables: Mapping[str, str],
    is_ready: Callable[[], bool],
    root: Path = ROOT,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module within the context; if it ends before it is ready, raise an error with its output."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=root,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
        )
        try:
            deadline = time.monotonic() + _READY_S
            while not is_ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise RuntimeError(f"{command[0]} does not serve:\n{output.read().decode()}")
                time.sleep(0.1)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(f"http://127.0.0.1:{port}/").is_success
    return False


def runs(port: int, models: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/status").text.count('"RUNNING"') >= models
    return False


async def _make_keys(database: str) -> dict[str, str]:
    registry = SqlRegistry(Database(database))
    try:
        await registry.create_tier(tier_with((), "limited", limits=_LIMITS))
        users = [f"user-{number}" for number in range(_USERS)]
        return {
            user: (await registry.create_key(user, tiers=["limited"])).api_key for user in users
        }
    finally:
        await registry.close()
