"""Real Redis, S3 and two Ray nodes on this machine, and server hosts that use them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.cluster.ray.rays import ray_cluster
from tests.services.redis import RedisServer
from tests.services.swift import ACCESS_KEY, SECRET_KEY, SwiftServer

from bench.servers.processes import ROOT

_WITHOUT_KEYS = {"NDIF_DEV_MODE": "true"}


@contextlib.contextmanager
def stores(
    accounts: Mapping[str, str] = _WITHOUT_KEYS,
) -> Iterator[tuple[dict[str, str], RedisServer]]:
    """Start a broker and an object store; yield a server's variables for them, and the broker.

    `accounts` are the variables for the server's accounts.
    """
    with contextlib.ExitStack() as stack:
        folders = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            for _ in range(3)
        )
        redis = stack.enter_context(RedisServer(next(folders)))
        s3_folder = next(folders)
        s3_folder.chmod(0o755)  # another user runs its processes
        s3 = stack.enter_context(SwiftServer(s3_folder))
        yield (
            {
                "NDIF_SESSION_ROOT": str(next(folders)),
                **accounts,
                "NDIF_BROKER_URL": redis.url,
                "NDIF_CLUSTER_SECRET": "a secret of the benchmarks",
                "NDIF_OBJECT_STORE_URL": s3.url,
                "NDIF_OBJECT_STORE_ACCESS_KEY": ACCESS_KEY,
                "NDIF_OBJECT_STORE_SECRET_KEY": SECRET_KEY,
                "NDIF_OBJECT_STORE_BUCKET": "bench",
                "NDIF_API_WORKERS": "2",
            },
            redis,
        )


@contextlib.contextmanager
def services(
    environment: Mapping[str, str], accounts: Mapping[str, str] = _WITHOUT_KEYS
) -> Iterator[tuple[dict[str, str], RedisServer]]:
    """Start the services of a server of many machines; return its environment and its broker."""
    with stores(accounts) as (variables, redis):
        settings = {**environment, **variables}
        with ray_cluster(settings, "one", "two") as ray:
            yield {**settings, "NDIF_RAY_ADDRESS": ray.address}, redis


def claimed(redis: RedisServer) -> int:
    """Return the number of requests that a dispatcher has claimed and that are unfinished."""
    return int(redis.command("xpending", "queue", "dispatchers").split()[0])


@dataclass
class NoopHost:
    """A server host whose models do nothing."""

    pid: int
    port: int
    folder: Path

    @property
    def leader(self) -> psutil.Process:
        """Return the process that is the leader or on standby."""
        for process in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                if "bench.noop.lead" in process.cmdline():
                    return process
        raise ProcessLookupError

    @property
    def is_leading(self) -> bool:
        """Return True if the process is the leader."""
        return "Leading" in self._log.rpartition("Standing by")[2]

    @property
    def standby_count(self) -> int:
        """Return how many times a process of this host has started as standby."""
        return self._log.count("Standing by")

    @property
    def _log(self) -> str:
        return (self.folder / "dispatcher.log").read_text()


@contextlib.asynccontextmanager
async def noop_host(settings: dict[str, str]) -> AsyncIterator[NoopHost]:
    """Start a host with two gateways."""
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.noop.host", folder),
            env={**os.environ, **settings},
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            port = int(await process.stdout.readline())
            yield NoopHost(process.pid, port, Path(folder))
        finally:
            process.terminate()
            await process.wait()
