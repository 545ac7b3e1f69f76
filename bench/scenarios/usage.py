"""The record of users' usage, compared with the sums of their clients."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import Figure
from bench.scenario import Site
from bench.servers.machine import machine
from bench.servers.processes import NDIF, client
from ndif.stores.accounts.port import tier_with
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry

_MODELS = ("bench/first", "bench/second")
_SECONDS = 30.0
_COUNTED_S = 60.0
"""Seconds within which the record contains all ended jobs."""


@dataclass(frozen=True)
class _User:
    name: str
    generation: str
    tier: str
    key: str = ""


_ENDS = ("COMPLETED", "ERROR", "CANCELLED")
_USERS = (
    # Two keys of one user.
    _User("ada", "0.8", "first"),
    _User("ada", "0.8", "second"),
    _User("bob", "0.7", "second"),
)


async def _with_keys(url: str) -> list[_User]:
    registry = SqlRegistry(Database(url))
    try:
        await registry.create_tier(tier_with(("priority",), "first"))
        await registry.create_tier(tier_with((), "second", limits={"unfinished_jobs": 50}))
        users = []
        for user in _USERS:
            key = (await registry.create_key(user.name, tiers=[user.tier])).api_key
            users.append(_User(user.name, user.generation, user.tier, key))
        return users
    finally:
        await registry.close()


def _run_clients(url: str, users: Sequence[_User], seconds: float) -> list[dict[str, Any]]:
    """Run a client of each key at once; return the sums of each client."""

    def run(number: int) -> dict[str, Any]:
        user = users[number]
        arguments = (user.key, str(seconds), str(number))
        try:
            process = client("usage", user.generation, url, *arguments, runs=",".join(_MODELS))
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"the client of {user.name} ended:\n{error.stderr}") from error
        sums: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return sums

    with ThreadPoolExecutor(len(users)) as threads:
        return [*threads.map(run, range(len(users)))]


def _counted(environment: Mapping[str, str], jobs: int) -> dict[str, dict[str, float]]:
    """Return the rows of `ndif usage` by user, once they have `jobs` jobs."""
    deadline = time.monotonic() + _COUNTED_S
    while True:
        process = subprocess.run(
            [NDIF, "usage", "--by", "user", "--json"],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        rows = {row["name"]: row for row in json.loads(process.stdout)["usage"]}
        if sum(row["jobs"] for row in rows.values()) >= jobs or time.monotonic() > deadline:
            return rows
        time.sleep(0.5)


def measure(site: Site) -> Iterator[Figure]:
    """Load a server for half a minute, or for the site's seconds, and compare."""
    seconds = site.seconds or _SECONDS
    with tempfile.TemporaryDirectory() as scratch:
        database = f"sqlite:///{Path(scratch, 'accounts.sqlite')}"
        users = asyncio.run(_with_keys(database))
        environment = {**site.environment, "NDIF_DATABASE_URL": database}
        with machine(dict.fromkeys(_MODELS, site.folder), environment) as host:
            sums = _run_clients(host.url, users, seconds)
            ends = sum(counts.get(end, 0) for counts in sums for end in _ENDS)
            counted = _counted({**environment, "NDIF_SESSION_ROOT": str(host.folder)}, ends)
    differs: Counter[str] = Counter()
    seconds_off = 0.0
    for name in {user.name for user in users}:
        own = [counts for user, counts in zip(users, sums, strict=True) if user.name == name]
        errors = sum(counts.get("ERROR", 0) for counts in own)
        jobs = sum(counts.get(end, 0) for counts in own for end in _ENDS)
        row = counted[name]
        differs["jobs"] += abs(int(row["jobs"]) - jobs)
        differs["errors"] += abs(int(row["errors"]) - errors)
        if name == "ada":  # bob's client gets neither
            size = sum(counts.get("result_bytes", 0) for counts in own)
            differs["bytes"] += abs(int(row["result_bytes"]) - size)
            seconds_off += abs(row["execution_s"] - sum(counts["execution_s"] for counts in own))
    how = f"{ends} jobs of both generations in {seconds:g} s, {sum(e.get('ERROR', 0) for e in sums)} errors"
    yield Figure("jobs that usage and clients count differently", differs["jobs"], 0, "", how=how)
    yield Figure("errors that they count differently", differs["errors"], 0, "")
    yield Figure("bytes of results that they count differently", differs["bytes"], 0, "")
    yield Figure("execution time that they count differently", seconds_off, 0.001, "s")
