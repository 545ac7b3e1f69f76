"""The cost of the control plane: gateway, queue and host, with a model that does nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import uvloop

from bench.figures import Figure
from bench.processes import ROOT
from bench.user import User

_USERS = 32
_ROUNDS = 5
_ROUND_S = 4.0
_RATE = 300
_RATE_S = 20.0


async def sustained(users: list[User]) -> float:
    """Return the requests a second when each user sends one request after the other."""
    ends = time.perf_counter() + _ROUND_S
    done = 0

    async def go_on(user: User) -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await user.run()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*map(go_on, users))
    return done / (time.perf_counter() - began)


async def at_rate(users: list[User]) -> list[float]:
    """Return the sorted seconds of each request, which arrive at random times at a fixed rate."""
    dice = random.Random(0)
    idle: asyncio.Queue[User] = asyncio.Queue()
    for user in users:
        idle.put_nowait(user)
    took: list[float] = []

    async def one(due: float) -> None:
        user = await idle.get()
        await user.run()
        took.append(time.perf_counter() - due)
        idle.put_nowait(user)

    due = began = time.perf_counter()
    running = []
    while due - began < _RATE_S:
        due += dice.expovariate(_RATE)
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        running.append(asyncio.create_task(one(due)))
    await asyncio.gather(*running)
    return sorted(took)


@contextlib.asynccontextmanager
async def _users() -> AsyncIterator[list[User]]:
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.control_server", folder),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            port = int(await process.stdout.readline())
            users = [User(port) for _ in range(_USERS)]
            for user in users:
                await user.connect()
            yield users
        finally:
            process.terminate()
            await process.wait()


async def _measure() -> tuple[list[float], list[float]]:
    async with _users() as users:
        await sustained(users)
        rates = [await sustained(users) for _ in range(_ROUNDS)]
        return rates, await at_rate(users)


def control() -> list[Figure]:
    """Measure the throughput, and the latency at a fixed rate."""
    rates, took = uvloop.run(_measure())
    p50, p99 = (took[int(len(took) * part)] * 1e3 for part in (0.5, 0.99))
    return [
        Figure(
            "control plane: sustained",
            statistics.median(rates),
            800,
            "requests/s",
            at_most=False,
            how=f"{_USERS} users, a no-op model process; {min(rates):.0f} to {max(rates):.0f} in "
            f"{_ROUNDS} rounds, with its clients on the same machine",
        ),
        Figure(
            f"control plane: p99 at {_RATE} requests/s",
            p99,
            50,
            "ms",
            how=f"{len(took):,} requests at random times, p50 {p50:.1f} ms",
        ),
    ]


if __name__ == "__main__":
    print(control())
