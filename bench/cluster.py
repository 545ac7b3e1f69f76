"""What many machines cost and what they bring. See `bench.services`."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import uvloop

from bench.control import sustained
from bench.figures import MB, Figure
from bench.processes import NAME, ROOT, client, resident, server
from bench.services import NoopHost, claimed, noop_host, services, started
from bench.user import User

_USERS = 32
_ROUNDS = 5
_QUEUED = 10_000
_KILLS = 3
_LOOK_S = 0.005
_PATIENCE_S = 120.0


def cluster(folder: Path, environment: dict[str, str]) -> list[Figure]:
    """All of it."""
    return [added(folder, environment), *uvloop.run(_without_a_model(environment))]


def added(folder: Path, environment: dict[str, str]) -> Figure:
    """What a small trace takes longer than on one machine."""
    named = f"{NAME}={folder}"
    with (
        # Clients need a model's config, and here they have it from this one.
        server(folder, environment) as (hub, _, _),
        services(environment) as (settings, _),
        tempfile.TemporaryDirectory() as alone,
        started(named, {**environment, "NDIF_SESSION_ROOT": alone}) as one,
        started(named, settings) as many,
    ):
        out = client("added.py", "0.8", hub, one, many)
    found = json.loads(out.stdout.splitlines()[-1])
    return Figure(
        "many machines - one, one layer",
        found["added"] * 1e3,
        15,
        "ms",
        how=f"p50 {found['many'] * 1e3:.1f} beside {found['one'] * 1e3:.1f} ms",
    )


async def _without_a_model(environment: dict[str, str]) -> list[Figure]:
    with services(environment) as (settings, redis):
        async with noop_host(settings) as host, noop_host(settings) as other:
            users = [User(host.port) for _ in range(_USERS)]
            for user in users:
                await user.connect()
            await _both(users, host.folder)
            figures = []
            for measuring in (
                _throughput(users, settings["NDIF_RAY_ADDRESS"]),
                _elsewhere(users, host.folder),
                _take_over(users[0], [host, other]),
                _memory([host, other], partial(claimed, redis)),
            ):
                figures.append(await asyncio.wait_for(measuring, _PATIENCE_S))
                print(figures[-1], flush=True)
            return figures


async def _throughput(users: list[User], ray_address: str) -> Figure:
    await sustained(users)
    rates = [await sustained(users) for _ in range(_ROUNDS)]
    calling = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.noop.calls", ray_address),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await calling.communicate()
    return Figure(
        "many machines: sustained",
        statistics.median(rates),
        300,
        "requests/s",
        at_most=False,
        how=f"{_USERS} users, two replicas that do nothing, two gateways; {min(rates):.0f} to "
        f"{max(rates):.0f} in {_ROUNDS} rounds; Ray alone carries {float(said):.0f} such calls/s",
    )


async def _elsewhere(users: list[User], folder: Path) -> Figure:
    """From the end of a replica's process until its job runs in another."""
    took = []
    for _ in range(_KILLS):
        await _both(users, folder)
        lost, told = users[0], folder / "lost"
        await lost.send(_busy(told))
        first = await _runs(told)
        began = time.perf_counter()
        psutil.Process(first).parent().kill()
        await _until(lambda told=told, first=first: _named(told) not in (None, first))
        took.append(time.perf_counter() - began)
        told.unlink()
        await lost.result()
    return Figure(
        "replica lost: its job runs elsewhere",
        max(took),
        5,
        "s",
        how=f"the slowest of {_KILLS}, the quickest {min(took):.2f} s; another is ready",
    )


async def _take_over(user: User, hosts: list[NoopHost]) -> Figure:
    """From the end of whoever leads until a request that was sent at once has its result."""
    took = []
    for _ in range(_KILLS):
        host = next(host for host in hosts if host.leads)
        stood_by = host.stood_by
        leader = host.leader
        began = time.perf_counter()
        leader.kill()
        await _accepted(user)
        await user.result()
        took.append(time.perf_counter() - began)
        await _until(lambda host=host, stood_by=stood_by: host.stood_by > stood_by)
    return Figure(
        "a standby takes over",
        max(took),
        10,
        "s",
        how=f"the slowest of {_KILLS}, the quickest {min(took):.2f} s: until a request is answered",
    )


async def _accepted(user: User) -> None:
    """Send a request, as often as that takes."""
    while True:
        try:
            return await user.send()
        except RuntimeError:
            await asyncio.sleep(_LOOK_S)


async def _memory(hosts: list[NoopHost], waiting: Callable[[], int]) -> Figure:
    """Of whoever leads, while many requests wait."""
    host = next(host for host in hosts if host.leads)
    # Those who have heard nothing for a while are taken for gone.
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
        how=f"{idle / MB:.0f} MB before; they were taken at {_QUEUED / sent_s:.0f}/s",
    )


async def _both(users: list[User], folder: Path) -> None:
    """Return once two jobs can run at a time."""
    held = [folder / "both-0", folder / "both-1"]
    for user, file in zip(users, held, strict=False):
        await user.send(_busy(file))
    for file in held:
        await _runs(file)
    for user, file in zip(users, held, strict=False):
        file.unlink()
        await user.result()


def _busy(told: Path) -> bytes:
    """A job that lasts until its file is gone."""
    return json.dumps({"tell": str(told)}).encode()


async def _runs(told: Path) -> int:
    """The process in which a job runs, once it does."""
    await _until(lambda: _named(told) is not None)
    return _named(told) or 0


def _named(told: Path) -> int | None:
    return int(told.read_text() or 0) or None if told.exists() else None


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(_LOOK_S)


if __name__ == "__main__":
    for figure in uvloop.run(_without_a_model(dict(os.environ))):
        print(figure)
