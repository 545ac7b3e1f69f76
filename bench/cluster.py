"""What many machines cost and what they bring. See `bench.services`."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import uvloop

from bench.control import sustained
from bench.figures import MB, Figure
from bench.processes import NAME, client, resident, server
from bench.services import NoopHost, claimed, noop_host, services, started
from bench.user import SMALL, User, answered, post

_USERS = 32
_ROUNDS = 5
_QUEUED = 10_000
_SENDERS = 8
_KILLS = 3
_LOOK_S = 0.005


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
            figures = [
                await _throughput(users),
                await _elsewhere(users, host.folder),
                await _take_over(users[0], [host, other]),
            ]
            leading = host if host.leads else other
            return [*figures, await _memory(users, leading, partial(claimed, redis))]


async def _throughput(users: list[User]) -> Figure:
    await sustained(users)
    rates = [await sustained(users) for _ in range(_ROUNDS)]
    return Figure(
        "many machines: sustained",
        statistics.median(rates),
        300,
        "requests/s",
        at_most=False,
        how=f"{_USERS} users, two replicas that do nothing, two gateways; {min(rates):.0f} to "
        f"{max(rates):.0f} in {_ROUNDS} rounds",
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
        await user.run()
        took.append(time.perf_counter() - began)
        await _until(lambda host=host, stood_by=stood_by: host.stood_by > stood_by)
    return Figure(
        "a standby takes over",
        max(took),
        10,
        "s",
        how=f"the slowest of {_KILLS}, the quickest {min(took):.2f} s: until a request is answered",
    )


async def _memory(users: list[User], host: NoopHost, waiting: Callable[[], int]) -> Figure:
    """Of whoever leads, while many requests wait."""
    held = [host.folder / "held-0", host.folder / "held-1"]
    for user, file in zip(users, held, strict=False):
        await user.send(_busy(file))
    for file in held:
        await _runs(file)
    idle = resident(host.leader.pid)
    began = time.perf_counter()
    await asyncio.gather(*(_send(host.port, _QUEUED // _SENDERS) for _ in range(_SENDERS)))
    sent_s = time.perf_counter() - began
    last = users[2]
    await last.send()
    await _until(lambda: waiting() >= _QUEUED)
    full = resident(host.leader.pid)
    began = time.perf_counter()
    for file in held:
        file.unlink()
    await last.result()
    done_s = time.perf_counter() - began
    for user in users[:2]:
        await user.result()
    return Figure(
        f"dispatcher with {_QUEUED:,} queued",
        full / MB,
        200,
        "MB",
        how=f"{idle / MB:.0f} MB before; taken at {_QUEUED / sent_s:.0f}/s and then run at "
        f"{_QUEUED / done_s:.0f}/s",
    )


async def _send(port: int, count: int) -> None:
    """Requests whose results are polled for, and here by nobody."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(count):
        writer.write(post(port, "", SMALL))
        await answered(reader)
    writer.close()


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
