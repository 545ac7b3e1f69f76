"""`ndif start` on this machine with default settings and keys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.profiles import drawn
from bench.scenario import Site
from bench.servers.processes import NAME, NDIF
from ndif.schema.account import Tier
from ndif.stores.accounts.port import tier_with
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry

_READY_S = 180.0
TRUSTED = "trusted"
USERS: Mapping[str, Tier | None] = {
    TRUSTED: tier_with(("trusted",), TRUSTED),
    **{f"user-{number}": None for number in range(8)},
}


@dataclass(frozen=True)
class Machine:
    """A running server."""

    url: str
    pid: int
    keys: Mapping[str, str]
    """Each user's key."""
    folder: Path
    """The session root."""

    @property
    def key(self) -> str:
        """Return the key of a sandboxed user."""
        return self.keys["user-0"]

    @property
    def port(self) -> int:
        """Return the port."""
        return int(self.url.rpartition(":")[2])

    def deploy(self, name: str, folder: Path) -> float:
        """Deploy a model; return the seconds until it serves.

        Raises:
            RuntimeError: If the deployment fails; the message is the server's.
        """
        deployment = {"repo_id": name, "checkpoint": str(folder)}
        began = time.perf_counter()
        answer = self._operate("deploy", {"deployments": [deployment], "wait": True})
        took = time.perf_counter() - began
        if problem := answer["models"][0]["problem"]:
            raise RuntimeError(problem)
        return took

    def evict(self, name: str, *, cold: bool = False) -> None:
        """Evict a model from its device, and with `cold` also from memory."""
        self._operate("evict", {"model": name, "cold": cold})

    def _operate(self, operation: str, body: Mapping[str, Any]) -> Any:
        token = (self.folder / "current" / "token").read_text().strip()
        answer = httpx.post(
            f"{self.url}/admin/{operation}",
            json=body,
            headers={"Authorization": f"Bearer {token}"},
            timeout=_READY_S,
        )
        return answer.raise_for_status().json()


@contextlib.contextmanager
def machine(
    models: Mapping[str, Path | str],
    environment: Mapping[str, str],
    *options: str,
    users: Mapping[str, Tier | None] = USERS,
) -> Iterator[Machine]:
    """Run `ndif start` with a replica of each model; yield the server once all models are loaded.

    Each user has a key; users without a tier are sandboxed.

    Raises:
        RuntimeError: If a model does not load; the message is the server's output.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="bench-") as root:
        database = f"sqlite:///{root}/accounts.sqlite"
        keys = asyncio.run(_make_keys(database, users))
        log = Path(root, "server.log")
        with log.open("w") as output:
            process = subprocess.Popen(
                [
                    *(NDIF, "start", "--port", str(port)),
                    *(f"{name}={checkpoint}" for name, checkpoint in models.items()),
                    *options,
                ],
                env={
                    **os.environ,
                    "NDIF_SESSION_ROOT": root,
                    "NDIF_DATABASE_URL": database,
                    "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
                    **environment,
                },
                stdout=output,
                stderr=output,
            )
        try:
            deadline = time.monotonic() + _READY_S
            while not _serves(url, len(models)):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
            with drawn(process.pid):
                yield Machine(url, process.pid, keys, Path(root))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def _serves(url: str, models: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        if models:
            return httpx.get(f"{url}/status").text.count('"RUNNING"') >= models
        return httpx.get(f"{url}/ping").is_success
    return False


async def _make_keys(database: str, users: Mapping[str, Tier | None]) -> dict[str, str]:
    registry = SqlRegistry(Database(database))
    try:
        for tier in filter(None, users.values()):
            await registry.create_tier(tier)
        return {
            user: (await registry.create_key(user, tiers=[tier.name] if tier else [])).api_key
            for user, tier in users.items()
        }
    finally:
        await registry.close()


SANDBOXED = "sandboxed"


@contextlib.contextmanager
def trusted_and_sandboxed(site: Site) -> Iterator[dict[str, dict[str, str]]]:
    """Run two equal servers of the demo model; yield the ways of a trusted and of a sandboxed user.

    A trusted job ends waiting sandboxed processes, so each user has a server.
    """
    models = {NAME: site.folder}
    with machine(models, site.environment) as first, machine(models, site.environment) as other:
        yield {
            TRUSTED: {"url": first.url, "key": first.keys[TRUSTED]},
            SANDBOXED: {"url": other.url, "key": other.key},
        }
