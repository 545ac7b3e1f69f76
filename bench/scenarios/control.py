"""The cost of the control plane: gateway, queue and host, with a model that does nothing."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvloop

from bench.clients.user import User, answered, get, pings, post
from bench.figures import Figure
from bench.sampling import Samples, in_turn_on_loop, quantile
from bench.scenario import Site
from bench.servers.machine import Machine
from bench.servers.no_op import no_op_machine

_USERS = 32
_ROUNDS = 5
_ROUND_S = 4.0
_RATE = 300
_RATE_S = 20.0
_ACCEPTED, _PAUSE_S = 40, 0.01
_LIVE, _POLLED = "live", "polled"
_WAITING = 2000
_PINGS = 500
_POLL_EVERY_S = 0.02


async def sustained(users: list[User]) -> float:
    """Return the requests per second when each user sends one request after the other."""
    ends = time.perf_counter() + _ROUND_S
    count = 0

    async def go_on(user: User) -> None:
        nonlocal count
        while time.perf_counter() < ends:
            await user.run()
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*map(go_on, users))
    return count / (time.perf_counter() - began)


async def at_rate(users: list[User]) -> list[float]:
    """Return the sorted seconds of each request, which arrive at random times at a fixed rate."""
    dice = random.Random(0)
    idle: asyncio.Queue[User] = asyncio.Queue()
    for user in users:
        idle.put_nowait(user)
    took: list[float] = []

    async def send(due: float) -> None:
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
        running.append(asyncio.create_task(send(due)))
    await asyncio.gather(*running)
    return sorted(took)


async def accepting(user: User) -> Samples:
    """Return the seconds until a live and a polled request are accepted."""

    async def accepted(*, polled: bool) -> float:
        took = []
        for _ in range(_ACCEPTED):
            await asyncio.sleep(_PAUSE_S)  # until the previous request has ended
            began = time.perf_counter()
            await user.send(polled=polled)
            took.append(time.perf_counter() - began)
            if not polled:
                await user.result()
        return statistics.median(took)

    return await in_turn_on_loop(
        {_LIVE: partial(accepted, polled=False), _POLLED: partial(accepted, polled=True)},
        rounds=_ROUNDS,
    )


async def beside_polled_jobs(port: int, api_key: str) -> list[float]:
    """Return the sorted seconds of `/ping` while many polled jobs wait and a client polls some of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    polls, asks = await asyncio.open_connection("127.0.0.1", port)
    with tempfile.TemporaryDirectory() as folder:
        tell = Path(folder) / "running"
        busy, jobs = json.dumps({"tell": str(tell)}).encode(), list[str]()
        for _ in range(_WAITING + 1):
            writer.write(post(port, "", busy, api_key=api_key))
            jobs.append(json.loads(await answered(reader))["id"])

        async def poll() -> None:
            for job in jobs * 100:
                asks.write(get(port, f"/response/{job}", api_key))
                await answered(polls)
                await asyncio.sleep(_POLL_EVERY_S)

        polling = asyncio.create_task(poll())
        took = await pings(port, _PINGS)
        polling.cancel()
    return sorted(took)


def measure(site: Site) -> Iterator[Figure]:
    """Measure the throughput, the latency at a fixed rate, acceptance, and `/ping` beside a long queue."""
    with no_op_machine(site.environment) as machine:
        yield from uvloop.run(_measure(machine))
    with no_op_machine(site.environment) as machine:
        pinged = uvloop.run(beside_polled_jobs(machine.port, machine.key))
    p50, p99 = (quantile(pinged, part) * 1e3 for part in (0.5, 0.99))
    how = (
        f"{len(pinged)} pings while jobs are polled, p50 {p50:.1f}, most {pinged[-1] * 1e3:.1f} ms"
    )
    name = f"control plane: p99 of /ping, {_WAITING:,} polled jobs waiting"
    yield Figure(name, p99, 20, "ms", how=how)


async def _measure(machine: Machine) -> list[Figure]:
    keys = [*machine.keys.values()]
    users = [User(machine.port, api_key=keys[number % len(keys)]) for number in range(_USERS)]
    for user in users:
        await user.connect()
    await sustained(users)
    rates = [await sustained(users) for _ in range(_ROUNDS)]
    took, accepted = await at_rate(users), await accepting(users[0])
    p50, p99 = (quantile(took, part) * 1e3 for part in (0.5, 0.99))
    return [
        Figure.of(
            "control plane: sustained",
            rates,
            800,
            "requests/s",
            at_most=False,
            how=f"{_USERS} users, a no-op model process, with its clients on the same machine",
        ),
        Figure(
            f"control plane: p99 at {_RATE} requests/s",
            p99,
            50,
            "ms",
            how=f"{len(took):,} requests at random times, p50 {p50:.1f} ms",
        ),
        Figure.of(
            "POST /request: a polled job beyond a live one",
            accepted.per_round(lambda polled, live: 1e3 * (polled - live), _POLLED, _LIVE),
            2,
            "ms more",
            how=f"its disk has the job; a live one takes {accepted.median(_LIVE) * 1e3:.1f} ms; "
            f"medians of {_ACCEPTED}, {accepted.summary}",
        ),
    ]
