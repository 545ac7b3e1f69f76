"""The cost and the throughput of a server of many machines; see `bench.servers.services`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import psutil
import uvloop

from bench.clients.user import User
from bench.figures import MB, Figure
from bench.sampling import in_turn_on_loop
from bench.scenario import Site
from bench.scenarios.control import sustained
from bench.servers.processes import ROOT, resident
from bench.servers.services import NoopHost, claimed, noop_host, services

_USERS = 32
_ROUNDS = 5
_QUEUED = 10_000
_KILLS = 3
_LOOK_S = 0.005
_PATIENCE_S = 120.0


def measure(site: Site) -> list[Figure]:
    """Measure a server of many machines."""
    return uvloop.run(_measure(site.environment))


async def _measure(environment: dict[str, str]) -> list[Figure]:
    with services({**environment, "NDIF_MAX_QUEUE_DEPTH": str(2 * _QUEUED)}) as (settings, redis):
        async with noop_host(settings) as host, noop_host(settings) as other:
            users = [User(host.port) for _ in range(_USERS)]
            for user in users:
                await user.connect()
            await _both(users, host.folder)
            return [
                await asyncio.wait_for(measuring, _PATIENCE_S)
                for measuring in (
                    _throughput(users, settings["NDIF_RAY_ADDRESS"]),
                    _elsewhere(users, host.folder),
                    _take_over(users[0], [host, other]),
                    _memory([host, other], partial(claimed, redis)),
                )
            ]


async def _throughput(users: list[User], ray_address: str) -> Figure:
    async with _calls(ray_address) as calls:
        samples = await in_turn_on_loop(
            {
                "jobs": partial(_seconds, partial(sustained, users)),
                "calls": partial(_seconds, calls),
            },
            rounds=_ROUNDS,
            warm_up=1,
        )
    return Figure.of(
        "many machines: sustained no-op jobs / calls of Ray alone",
        samples.per_round(lambda job, call: call / job, "jobs", "calls"),
        1.2,
        "x",
        at_most=False,
        how=f"{1 / samples.median('jobs'):.0f} requests and {1 / samples.median('calls'):.0f} calls a "
        f"second; {_USERS} users, two gateways, two replicas or actors; {samples.summary}",
    )


async def _seconds(rate: Callable[[], Awaitable[float]]) -> float:
    return 1 / await rate()


@contextlib.asynccontextmanager
async def _calls(ray_address: str) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Start `bench.noop.calls`; yield a function that measures once."""
    calling = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.noop.calls", ray_address),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert calling.stdin is not None
    assert calling.stdout is not None
    ask, output = calling.stdin, calling.stdout

    async def rate() -> float:
        ask.write(b"\n")
        return float(await output.readline())

    try:
        yield rate
    finally:
        ask.close()
        await calling.wait()


async def _elsewhere(users: list[User], folder: Path) -> Figure:
    """Measure the time from the end of a replica's process until its job runs in another replica."""
    took = []
    for _ in range(_KILLS):
        await _both(users, folder)
        user, file = users[0], folder / "lost"
        await user.send(_busy(file))
        first = await _runs(file)
        began = time.perf_counter()
        psutil.Process(first).parent().kill()
        await _until(lambda file=file, first=first: _written_pid(file) not in (None, first))
        took.append(time.perf_counter() - began)
        file.unlink()
        await user.result()
    return Figure(
        "replica lost: its job runs elsewhere",
        max(took),
        5,
        "s",
        how=f"slowest of {_KILLS}, fastest {min(took):.2f} s; another replica is ready",
    )


async def _take_over(user: User, hosts: list[NoopHost]) -> Figure:
    """Measure the time from the end of the leader until a request sent at once has its result."""
    took = []
    for _ in range(_KILLS):
        host = next(host for host in hosts if host.is_leading)
        standbys = host.standby_count
        leader = host.leader
        began = time.perf_counter()
        leader.kill()
        await _accepted(user)
        await user.result()
        took.append(time.perf_counter() - began)
        await _until(lambda host=host, standbys=standbys: host.standby_count > standbys)
    return Figure(
        "a standby takes over",
        max(took),
        10,
        "s",
        how=f"slowest of {_KILLS}, fastest {min(took):.2f} s: until a request is answered",
    )


async def _accepted(user: User) -> None:
    """Send a request repeatedly until it is accepted."""
    while True:
        try:
            return await user.send()
        except RuntimeError:
            await asyncio.sleep(_LOOK_S)


async def _memory(hosts: list[NoopHost], waiting: Callable[[], int]) -> Figure:
    """Measure the leader's memory while many requests wait."""
    host = next(host for host in hosts if host.is_leading)
    # Use new users: the server drops clients that have received nothing for a while.
    senders = [User(host.port) for _ in range(_USERS)]
    for sender in senders:
        await sender.connect()
    held = [host.folder / "held-0", host.folder / "held-1"]
    for sender, file in zip(senders, held, strict=False):
        await sender.send(_busy(file))
        await _runs(file)
    idle = resident(host.leader.pid)
    began = time.perf_counter()
    await asyncio.gather(*(user.send_many(-(-_QUEUED // len(senders))) for user in senders))
    sent_s = time.perf_counter() - began
    await _until(lambda: waiting() >= _QUEUED)
    full = resident(host.leader.pid)
    return Figure(
        f"dispatcher with {_QUEUED:,} queued",
        full / MB,
        200,
        "MB",
        how=f"{idle / MB:.0f} MB before; accepted at {_QUEUED / sent_s:.0f} requests/s",
    )


async def _both(users: list[User], folder: Path) -> None:
    """Wait until two jobs run at once."""
    held = [folder / "both-0", folder / "both-1"]
    for user, file in zip(users, held, strict=False):
        await user.send(_busy(file))
    for file in held:
        await _runs(file)
    for user, file in zip(users, held, strict=False):
        file.unlink()
        await user.result()


def _busy(file: Path) -> bytes:
    """Return a job that writes its process id to a file and runs until the file is deleted."""
    return json.dumps({"tell": str(file)}).encode()


async def _runs(file: Path) -> int:
    """Wait until a job runs; return its process id."""
    await _until(lambda: _written_pid(file) is not None)
    return _written_pid(file) or 0


def _written_pid(file: Path) -> int | None:
    return int(file.read_text() or 0) or None if file.exists() else None


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(_LOOK_S)
