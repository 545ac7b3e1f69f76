"""Interrupt the services of a server of many machines under load, and count the ends of its jobs.

Usage: python -m bench.outages [KIND...]; not part of `make bench`, since it takes a quarter of an hour.

Redis, S3 and Ray are real; the models do nothing. Ray's head has one replica and another node has a second;
the head keeps its state in a Redis (`RAY_REDIS_ADDRESS`). In each round, clients that poll and clients with
a live channel send jobs of some seconds. An outage begins while the jobs wait and run, and an operator ends
three of them. A round ends when every job has reached a terminal status or its live client's channel is
closed. A job without an end `_BOUND_S` after the outage counts as hung.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import uvloop
from rich.console import Console
from rich.table import Table
from tests.cluster.ray.rays import OFFERED, ray_cluster
from tests.services.process import HOST
from tests.services.ray import RayServer
from tests.services.redis import RedisServer

from bench.clients.user import KEY, User
from bench.figures import columns_of_ends
from bench.noop.host import TOKEN
from bench.servers.services import NoopHost, noop_host, stores
from ndif.cluster.ray.cluster import declaration

_POLLED, _LIVE = 12, 6
_JOB = json.dumps({"for_s": 2.0}).encode()
_BOUND_S = 150.0
_LOOK_S = 0.25
_SETTLED_S = 5.0
_REPEATED = "a replica does not answer"
"""Part of the log line of each repeated call to a replica."""


@dataclass
class Stack:
    """The services of a server of many machines, and the server."""

    redis: RedisServer
    ray: RayServer
    host: NoopHost

    def log(self) -> str:
        """Return the leader's log."""
        return (self.host.folder / "dispatcher.log").read_text()


async def head_dies(stack: Stack) -> None:
    """Kill all processes of Ray's head; restart it after five seconds."""
    await asyncio.to_thread(stack.ray.head.kill)
    await asyncio.sleep(5)
    await asyncio.to_thread(stack.ray.head.start)


async def head_is_away(stack: Stack) -> None:
    """Kill all processes of Ray's head for longer than the leader waits for it."""
    await asyncio.to_thread(stack.ray.head.kill)
    await asyncio.sleep(30)
    await asyncio.to_thread(stack.ray.head.start)


async def head_freezes(stack: Stack) -> None:
    """Freeze all processes of Ray's head for 20 s."""
    frozen = stack.ray.head.processes()
    for number in ("suspend", "resume"):
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, number)()
        await asyncio.sleep(20 if number == "suspend" else 0)


async def broker_stops(stack: Stack) -> None:
    """Stop Redis for 70 s."""
    await asyncio.to_thread(stack.redis.stop)
    await asyncio.sleep(70)
    await asyncio.to_thread(stack.redis.start)


async def broker_freezes(stack: Stack) -> None:
    """Make Redis accept connections without answers for 70 s."""
    stack.redis.pause()
    await asyncio.sleep(70)
    stack.redis.resume()


async def broker_is_emptied(stack: Stack) -> None:
    """Delete all of Redis's data."""
    await asyncio.to_thread(stack.redis.command, "flushall")


KINDS: dict[str, Callable[[Stack], Awaitable[None]]] = {
    "head dies": head_dies,
    "head is away for 30 s": head_is_away,
    "head freezes for 20 s": head_freezes,
    "broker stops for 70 s": broker_stops,
    "broker freezes for 70 s": broker_freezes,
    "broker is emptied": broker_is_emptied,
}


@dataclass
class Tally:
    """The ends of one round's jobs."""

    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    repeated: int = 0
    """Calls to replicas that were repeated."""
    still_repeated: int = 0
    """Calls that are still repeated after the round."""
    slowest_s: float = 0.0
    """Seconds from the end of the outage to the last job's end."""


class Polled:
    """A job that is polled."""

    def __init__(self, host: NoopHost) -> None:
        self._http = httpx.AsyncClient(base_url=f"http://{HOST}:{host.port}", timeout=30)
        self.id = ""
        self.description = ""

    async def send(self) -> None:
        """Send the job repeatedly until it is accepted."""
        data = json.dumps({"model_key": KEY, "session_id": "", "compress": False, "env": {}})
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._http.post(
                    "/request",
                    data={"data": data},
                    files={"blob": ("blob", _JOB)},
                    headers={"nnsight-version": "0.8.1"},
                )
                if answer.status_code == httpx.codes.OK:
                    self.id = answer.json()["id"]
                    return
            await asyncio.sleep(_LOOK_S)

    async def end(self) -> str:
        """Poll for the end, and return its status."""
        while True:
            await asyncio.sleep(_LOOK_S)
            with contextlib.suppress(httpx.HTTPError):
                answer = await self._http.get(f"/response/{self.id}")
                if answer.status_code == httpx.codes.NOT_FOUND:
                    return "lost"
                if answer.status_code == httpx.codes.OK:
                    response = answer.json()
                    if response["status"] in ("COMPLETED", "ERROR"):
                        self.description = response["description"]
                        return str(response["status"])


async def live(user: User, tally: Tally) -> str:
    """Wait for the end of a job on a live channel; return it, or "closed"."""
    try:
        await user.result()
    except RuntimeError as error:
        tally.reasons[json.loads(str(error))["description"]] += 1
        return "ERROR"
    except (OSError, asyncio.IncompleteReadError):
        return "closed"
    return "COMPLETED"


async def kill(host: NoopHost, job: Polled) -> str:
    """End a job as an operator; return "ended", or the refusal's status."""
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"http://{HOST}:{host.port}/admin/kill",
            json={"request_id": job.id},
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
    return "ended" if answer.status_code == httpx.codes.OK else f"refused ({answer.status_code})"


async def one_round(stack: Stack, outage: Callable[[Stack], Awaitable[None]]) -> Tally:
    """Send the jobs, begin the outage, end three jobs, count the ends."""
    tally = Tally()
    said_before = stack.log().count(_REPEATED)
    polled = [Polled(stack.host) for _ in range(_POLLED)]
    for job in polled:
        await job.send()
    users = [User(stack.host.port) for _ in range(_LIVE)]
    for user in users:
        await user.connect()
        await user.send(_JOB)
    ends = {
        **{asyncio.ensure_future(job.end()): "polled" for job in polled},
        **{asyncio.ensure_future(live(user, tally)): "live" for user in users},
    }
    waiting = asyncio.ensure_future(asyncio.wait(ends))
    out = asyncio.ensure_future(outage(stack))
    await asyncio.sleep(1)
    # The first two jobs run, the last one waits.
    killed = [*polled[:2], polled[-1]]
    answers = await asyncio.gather(
        *(kill(stack.host, job) for job in killed), return_exceptions=True
    )
    await out
    over = time.monotonic()
    await asyncio.wait([waiting], timeout=_BOUND_S)
    tally.slowest_s = time.monotonic() - over
    for task, how in ends.items():
        tally.ends[f"{how} {task.result() if task.done() else 'hung'}"] += 1
        task.cancel()
    waiting.cancel()
    for job in polled:
        tally.reasons[job.description] += bool(job.description)
    for job, answer in zip(killed, answers, strict=True):
        became = "ended" if "operator has ended" in job.description else "ran on"
        tally.kills[f"{answer if isinstance(answer, str) else 'no answer'}, {became}"] += 1
    after = stack.log().count(_REPEATED)
    await asyncio.sleep(_SETTLED_S)
    tally.repeated = after - said_before
    tally.still_repeated = stack.log().count(_REPEATED) - after
    return tally


@contextlib.contextmanager
def services() -> Iterator[tuple[dict[str, str], RedisServer, RayServer]]:
    """Start the services; return the server's environment, the broker and the cluster."""
    with contextlib.ExitStack() as stack:
        variables, redis = stack.enter_context(stores())
        settings = {**os.environ, **variables}
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="outages-"))
        memory = stack.enter_context(RedisServer(Path(folder)))
        kept = {"RAY_REDIS_ADDRESS": f"{HOST}:{memory.port}"}
        offered = declaration(OFFERED)
        ray = stack.enter_context(ray_cluster(settings, "one", head=kept, resources=offered))
        yield {**settings, "NDIF_RAY_ADDRESS": ray.address}, redis, ray


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Stack]:
    """Start the services and the server."""
    with services() as (settings, redis, ray):
        async with noop_host(settings) as host:
            yield Stack(redis, ray, host)


async def until_ready(stack: Stack) -> None:
    """Wait until both replicas serve."""
    async with httpx.AsyncClient(timeout=30) as http:
        while True:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                answer = await http.get(f"http://{HOST}:{stack.host.port}/status")
                (deployment, *_) = answer.json()["deployments"].values()
                if deployment["replicas"] == {"0.8": 2} and len(deployment["nodes"]) == 2:
                    return
            await asyncio.sleep(_LOOK_S)


async def measure(kinds: list[str]) -> dict[str, Tally]:
    """Run a round with each kind of outage."""
    tallies = {}
    async with started() as stack:
        for kind in kinds:
            await asyncio.wait_for(until_ready(stack), _BOUND_S)
            tallies[kind] = await one_round(stack, KINDS[kind])
            print(kind, tallies[kind], flush=True)
    return tallies


def main() -> None:
    """Run the outages, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    tallies = uvloop.run(measure(parser.parse_args().kinds or list(KINDS)))
    columns = columns_of_ends([tally.ends for tally in tallies.values()])
    shown = Table("outage", *columns, "killed", "calls repeated", "last end after")
    for kind, tally in tallies.items():
        kills = "; ".join(f"{count} {outcome}" for outcome, count in tally.kills.items())
        repeated = f"{tally.repeated}, then {tally.still_repeated}"
        counts = (str(tally.ends[column]) for column in columns)
        shown.add_row(kind, *counts, kills, repeated, f"{tally.slowest_s:.0f} s")
    Console(width=180).print(shown)


if __name__ == "__main__":
    main()
