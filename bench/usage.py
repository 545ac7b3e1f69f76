"""The record of what users' jobs cost beside the sum of what their clients were told.

Usage: python -m bench.usage [--seconds N]: N seconds of mixed load, an hour if it is not given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.figures import Figure, table
from bench.processes import CACHE, NDIF, client, older_runtime
from ndif.stores.accounts import Tier
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
from prepare_model import prepare  # an example; `bench.processes` puts its folder on the path

_MODELS = ("bench/first", "bench/second")
_READY_S = 120.0
_COUNTED_S = 60.0
"""Seconds within which the record has what has ended."""


@dataclass(frozen=True)
class _User:
    name: str
    generation: str
    tier: str
    key: str = ""


_USERS = (
    # Two keys of one user.
    _User("ada", "0.8", "first"),
    _User("ada", "0.8", "second"),
    _User("bob", "0.7", "second"),
)


async def _with_keys(url: str) -> list[_User]:
    registry = SqlRegistry(Database(url))
    try:
        await registry.create_tier(Tier("first", priority=True))
        await registry.create_tier(Tier("second", limits={"unfinished_jobs": 50}))
        made = []
        for user in _USERS:
            key, _ = await registry.create_key(user.name, tiers=[user.tier])
            made.append(_User(user.name, user.generation, user.tier, key))
        return made
    finally:
        await registry.close()


@contextlib.contextmanager
def _server(root: Path, environment: Mapping[str, str]) -> Iterator[str]:
    folder = prepare(CACHE / "smollm2-135m")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    models = [f"{name}={folder}" for name in _MODELS]
    url = f"http://127.0.0.1:{port}"
    with (root / "server.log").open("w") as log:
        process = subprocess.Popen(
            [NDIF, "start", *models, "--port", str(port)], env=environment, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + _READY_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/status").text.count('"RUNNING"') >= len(_MODELS):
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((root / "server.log").read_text())
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _told(url: str, users: Sequence[_User], seconds: float) -> list[dict[str, Any]]:
    """Run a client of each key at once; return what each was told."""

    def run(number: int) -> dict[str, Any]:
        user = users[number]
        arguments = (user.key, str(seconds), str(number))
        try:
            done = client(
                "usage_client.py", user.generation, url, *arguments, runs=",".join(_MODELS)
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"the client of {user.name} ended:\n{error.stderr}") from error
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor(len(users)) as threads:
        return [*threads.map(run, range(len(users)))]


def _counted(environment: Mapping[str, str], jobs: int) -> dict[str, dict[str, float]]:
    """Return `ndif usage` once it has so many jobs, by user."""
    deadline = time.monotonic() + _COUNTED_S
    while True:
        done = subprocess.run(
            [NDIF, "usage", "--by", "user", "--json"],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        found = {row["name"]: row for row in json.loads(done.stdout)["usage"]}
        if sum(row["jobs"] for row in found.values()) >= jobs or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def usage(seconds: float) -> Iterator[Figure]:
    """Load a server for so long, and compare."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        database = f"sqlite:///{root / 'accounts.sqlite'}"
        users = asyncio.run(_with_keys(database))
        environment = {
            **os.environ,
            "NDIF_SESSION_ROOT": str(root),
            "NDIF_DATABASE_URL": database,
            **older_runtime(),
        }
        with _server(root, environment) as url:
            told = _told(url, users, seconds)
            ends = sum(each.get("COMPLETED", 0) + each.get("ERROR", 0) for each in told)
            counted = _counted(environment, ends)
    differs: Counter[str] = Counter()
    seconds_off = 0.0
    for name in {user.name for user in users}:
        own = [each for user, each in zip(users, told, strict=True) if user.name == name]
        errors = sum(each.get("ERROR", 0) for each in own)
        jobs = errors + sum(each.get("COMPLETED", 0) for each in own)
        row = counted[name]
        differs["jobs"] += abs(int(row["jobs"]) - jobs)
        differs["errors"] += abs(int(row["errors"]) - errors)
        if name == "ada":  # bob's client is told neither
            size = sum(each.get("result_bytes", 0) for each in own)
            differs["bytes"] += abs(int(row["result_bytes"]) - size)
            seconds_off += abs(row["execution_s"] - sum(each["execution_s"] for each in own))
    how = f"{ends} jobs of both generations in {seconds:g} s, {sum(e.get('ERROR', 0) for e in told)} errors"
    yield Figure("jobs that usage and clients count differently", differs["jobs"], 0, "", how=how)
    yield Figure("errors that they count differently", differs["errors"], 0, "")
    yield Figure("bytes of results that they count differently", differs["bytes"], 0, "")
    yield Figure("execution time that they count differently", seconds_off, 0.001, "s")


def main() -> None:
    """Measure for as long as asked, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600)
    seconds = parser.parse_args().seconds
    Console(width=160).print(table("usage", usage(seconds)))


if __name__ == "__main__":
    main()
