"""The cost of the control plane: gateway, queue and host, with a model that does nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from bench.figures import Figure
from bench.processes import ROOT
from bench.user import User, answered, post

_USERS = 32
_ROUNDS = 5
_ROUND_S = 4.0
_RATE = 300
_RATE_S = 20.0
_ACCEPTED, _PAUSE_S = 200, 0.01
_WAITING = 2000
_PINGS = 500
_PING_EVERY_S = 0.02


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


async def accepting(user: User) -> tuple[float, float]:
    """Return the median seconds until a live and a polled request are accepted, one after the other."""
    medians = []
    for polled in (False, True):
        took = []
        for _ in range(_ACCEPTED):
            await asyncio.sleep(_PAUSE_S)  # until the one before has ended
            began = time.perf_counter()
            await user.send(polled=polled)
            took.append(time.perf_counter() - began)
            if not polled:
                await user.result()
        medians.append(statistics.median(took))
    return medians[0], medians[1]


async def pings(port: int) -> list[float]:
    """Return the sorted seconds of `/ping` while many polled jobs wait, some of which are polled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    polls, asks = await asyncio.open_connection("127.0.0.1", port)
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        tell = Path(folder) / "running"
        busy, jobs = json.dumps({"tell": str(tell)}).encode(), list[str]()
        for _ in range(_WAITING + 1):
            writer.write(post(port, "", busy))
            jobs.append(json.loads(await answered(reader))["id"])

        async def poll() -> None:
            for job in jobs * 100:
                asks.write(
                    f"GET /response/{job} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
                )
                await answered(polls)
                await asyncio.sleep(_PING_EVERY_S)

        polling = asyncio.create_task(poll())
        due = time.perf_counter()
        for _ in range(_PINGS):
            # One that comes while another is held up is held up as well.
            due += _PING_EVERY_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            writer.write(f"GET /ping HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            await answered(reader)
            took.append(time.perf_counter() - due)
        polling.cancel()
    return sorted(took)


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[int]:
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.control_server", folder),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            yield int(await process.stdout.readline())
        finally:
            process.terminate()
            await process.wait()


async def _measure() -> tuple[list[float], list[float], tuple[float, float], list[float]]:
    async with _server() as port:
        users = [User(port) for _ in range(_USERS)]
        for user in users:
            await user.connect()
        await sustained(users)
        rates = [await sustained(users) for _ in range(_ROUNDS)]
        took, accepted = await at_rate(users), await accepting(users[0])
    async with _server() as port:
        return rates, took, accepted, await pings(port)


def control() -> list[Figure]:
    """Measure the throughput, the latency at a fixed rate, acceptance, and `/ping` beside a long queue."""
    rates, took, (live_s, polled_s), pinged = uvloop.run(_measure())
    p50, p99 = (took[int(len(took) * part)] * 1e3 for part in (0.5, 0.99))
    ping_p50, ping_p99 = (pinged[int(len(pinged) * part)] * 1e3 for part in (0.5, 0.99))
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
        Figure(
            "POST /request: a polled job beyond a live one",
            (polled_s - live_s) * 1e3,
            2,
            "ms",
            how=f"medians of {_ACCEPTED}: its disk has the job; a live one takes {live_s * 1e3:.1f} ms",
        ),
        Figure(
            f"control plane: p99 of /ping, {_WAITING:,} polled jobs waiting",
            ping_p99,
            20,
            "ms",
            how=f"{len(pinged)} pings while jobs are polled, p50 {ping_p50:.1f}, "
            f"most {pinged[-1] * 1e3:.1f} ms",
        ),
    ]


if __name__ == "__main__":
    print(control())
