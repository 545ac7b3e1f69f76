"""The cost of API keys and their limits: per request, with many keys, and with idle live channels."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import uvloop
from sqlalchemy import insert

from bench.clients.user import User
from bench.figures import MB, Figure
from bench.scenario import Site
from bench.servers.processes import ROOT
from ndif.stores.accounts.port import tier_with
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
from ndif.stores.accounts.sql.tables import ASSIGNMENTS, KEYS

_FEW, _MANY = 100, 100_000
_ROUNDS, _POSTS = 6, 40
_CHANNELS = 500
_LIMITS = {"requests_per_minute": 100_000, "execution_s_per_day": 3600, "unfinished_jobs": 100_000}


def _key(number: int) -> str:
    return f"key-{number:030}"


async def _fill(url: str, count: int) -> None:
    database = Database(url)
    registry = SqlRegistry(database)
    await registry.create_tier(tier_with((), "limited", limits=_LIMITS))
    keys = [
        {
            "id": f"{number:012}",
            "digest": hashlib.sha256(_key(number).encode()).hexdigest(),
            "name": "",
            "created_at": 0.0,
        }
        for number in range(count)
    ]
    async with database.writing() as connection:
        await connection.execute(insert(KEYS), keys)
        tiers = [{"key_id": key["id"], "tier_id": 1} for key in keys]
        await connection.execute(insert(ASSIGNMENTS), tiers)
    await registry.close()


@contextlib.asynccontextmanager
async def _server(url: str = "") -> AsyncIterator[tuple[int, int]]:
    """Yield the port and the process of a server."""
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.servers.accounts", folder, *([url] if url else [])),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            port = int(await process.stdout.readline())
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
            yield port, process.pid
        finally:
            process.kill()
            await process.wait()


async def _posts(user: User) -> list[float]:
    took = []
    for _ in range(_POSTS):
        began = time.perf_counter()
        await user.send()
        took.append(time.perf_counter() - began)
    return took


async def _first_posts(port: int, numbers: Sequence[int]) -> float:
    """Return the median seconds of each key's first request."""
    took = []
    for number in numbers:
        user = User(port, api_key=_key(number))
        began = time.perf_counter()
        await user.connect()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def _measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        few, many = (f"sqlite:///{folder}/{count}.sqlite" for count in (_FEW, _MANY))
        await _fill(few, _FEW)
        await _fill(many, _MANY)
        async with _server() as (open_, _), _server(few) as (small, _), _server(many) as (big, pid):
            users = [User(open_), User(small, api_key=_key(0)), User(big, api_key=_key(0))]
            took: list[list[float]] = [[] for _ in users]
            for user in users:
                await user.connect()
                await _posts(user)
            for _ in range(_ROUNDS):
                for seconds, user in zip(took, users, strict=True):
                    seconds += await _posts(user)
            without, with_few, with_many = map(statistics.median, took)
            firsts = [await _first_posts(port, range(1, _FEW)) for port in (small, big)]
            before = _resident(pid)
            idle = [User(big, api_key=_key(number)) for number in range(1, _CHANNELS + 1)]
            for user in idle:
                await user.connect()
            grown = _resident(pid) - before
    how = f"median of {_ROUNDS * _POSTS} in turn with a server that has no keys, SQLite"
    return [
        Figure(
            "a key and three limits, added to POST", 1e3 * (with_few - without), 1, "ms", how=how
        ),
        Figure(
            f"POST with {_MANY} keys, of that with {_FEW}", with_many / with_few, 1.1, "x", how=how
        ),
        Figure(
            f"first use of a key of {_MANY}, of one of {_FEW}",
            firsts[1] / firsts[0],
            1.25,
            "x",
            how="a live channel is opened, which looks the key up in the database",
        ),
        Figure(f"{_CHANNELS} idle live channels", grown / MB, 60, "MB", how="growth of the server"),
    ]


def measure(_: Site) -> Iterator[Figure]:
    """Measure keys and limits."""
    yield from uvloop.run(_measure())
