"""Kill processes of a server under load, and count the ends of its users' jobs.

Usage: python -m bench.kills [--times N] [KIND...]; not part of `make bench`, since it takes an hour.

In each round 12 clients that poll and 6 with a live channel send one job each. One process of the kind is
killed while the jobs wait or run. A round ends when every job has reached a terminal status or its live
client's channel is closed. A job without an end after `_BOUND_S` counts as hung. A killed server is
restarted, as by a service manager.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvloop
from rich.console import Console
from rich.table import Table
from tests.clients.harness import children, model_processes

from bench.clients.user import User
from bench.figures import columns_of_ends
from bench.servers.processes import CACHE, NAME, NDIF, client
from ndif.runtime.process.fork_server import OPTION
from prepare_model import (
    prepare,
)  # in examples/; `bench.servers.processes` puts that folder on the path

_POLLED, _LIVE = 12, 6
_BOUND_S = 150.0
_POLL_S = 0.25
_SPREAD_S = 4.0
"""A process is killed within this many seconds after the first job."""


class Server:
    """`ndif start` on one machine, which can be restarted at the same address after a kill."""

    def __init__(self, folder: Path, port: int, environment: dict[str, str]) -> None:
        self.port = port
        self._command = (NDIF, "start", f"{NAME}={folder}", "--port", str(port))
        self._environment = environment

    @property
    def url(self) -> str:
        """Return the address."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start the server; return when its model is loaded."""
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            env=self._environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await self.until_ready()

    async def until_ready(self) -> None:
        """Wait until the model is loaded."""
        async with httpx.AsyncClient() as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if '"RUNNING"' in (await http.get(f"{self.url}/status")).text:
                        return
                await asyncio.sleep(_POLL_S)


def server_process(server: Server) -> int | None:
    """Return the server's own process."""
    return server.process.pid


def fork_server(server: Server) -> int | None:
    """Return the process whose forks are model processes."""
    for child in children(server.process.pid):
        if OPTION in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            return child
    return None


def model_process(server: Server) -> int | None:
    """Return the process that holds the weights."""
    return next(iter(model_processes(server.process.pid)), None)


def runner(server: Server) -> int | None:
    """Return a process that runs a job or waits for one."""
    zygote = model_process(server)
    return random.choice(children(zygote) or [None]) if zygote is not None else None


KINDS: dict[str, tuple[Callable[[Server], int | None], signal.Signals]] = {
    "server": (server_process, signal.SIGKILL),
    "fork server": (fork_server, signal.SIGKILL),
    "model process": (model_process, signal.SIGKILL),
    "runner": (runner, signal.SIGKILL),
    "frozen model process": (model_process, signal.SIGSTOP),
}


@dataclass
class Tally:
    """The ends of the jobs of one kind's rounds."""

    kills: int = 0
    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    slowest_s: float = 0.0


async def polled(server: Server, key: str, payload: bytes) -> str:
    """Send a job and poll for its end; return the end."""
    data = json.dumps({"model_key": key, "session_id": "", "compress": False, "env": {}})
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as http:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await http.post(
                    "/request",
                    data={"data": data},
                    files={"blob": ("blob", payload)},
                    headers={"nnsight-version": "0.8.1"},
                )
                if answer.status_code == httpx.codes.OK:
                    break
            await asyncio.sleep(_POLL_S)
        identity = answer.json()["id"]
        while True:
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(httpx.HTTPError):
                answer = await http.get(f"/response/{identity}")
                if answer.status_code == httpx.codes.NOT_FOUND:
                    return "lost"
                if answer.status_code == httpx.codes.OK:
                    response = answer.json()
                    if response["status"] == "ERROR":
                        print(response["description"])
                    if response["status"] in ("COMPLETED", "ERROR"):
                        return str(response["status"])


async def live(server: Server, key: str, payload: bytes) -> str:
    """Send a job on a live channel; return its end, or "closed"."""
    user = User(server.port, key)
    try:
        await user.connect()
        await user.send(payload)
        await user.result()
    except RuntimeError:
        return "ERROR"
    except (OSError, asyncio.IncompleteReadError):
        return "closed"
    return "COMPLETED"


async def kill_one(server: Server, kind: str) -> None:
    """Kill a process of the kind at a random time."""
    find, number = KINDS[kind]
    await asyncio.sleep(random.uniform(0, _SPREAD_S))
    while (pid := find(server)) is None:  # noqa: ASYNC110 - other processes' state
        await asyncio.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if kind == "server":
        await server.process.wait()
        await server.start()


async def one_round(server: Server, kind: str, key: str, payload: bytes, tally: Tally) -> None:
    """Send the jobs, kill a process, count the ends."""
    jobs = [
        *(("polled", asyncio.ensure_future(polled(server, key, payload))) for _ in range(_POLLED)),
        *(("live", asyncio.ensure_future(live(server, key, payload))) for _ in range(_LIVE)),
    ]
    began = time.monotonic()
    await kill_one(server, kind)
    await asyncio.wait([job for _, job in jobs], timeout=_BOUND_S)
    for how, job in jobs:
        tally.ends[f"{how} {job.result() if job.done() else 'hung'}"] += 1
        job.cancel()
    tally.kills += 1
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)


async def measure(kinds: list[str], times: int) -> dict[str, Tally]:
    """Kill each kind of process."""
    folder = prepare(CACHE / "smollm2-135m")
    tallies = {}
    with tempfile.TemporaryDirectory() as root:
        port = random.randrange(20000, 30000)
        environment = {
            **os.environ,
            "NDIF_SESSION_ROOT": root,
            "NDIF_DEV_MODE": "true",
            "NDIF_RUNTIMES_DIR": str(CACHE / "runtimes"),
        }
        server = Server(folder, port, environment)
        await server.start()
        sent = json.loads(client("payload", "0.8", server.url).stdout.splitlines()[-1])
        payload = base64.b64decode(sent["payload"])
        for kind in kinds:
            tally = tallies[kind] = Tally()
            for _ in range(times):
                await server.until_ready()
                await one_round(server, kind, sent["key"], payload, tally)
            print(kind, tally, flush=True)
        server.process.terminate()
        await server.process.wait()
    return tallies


def main() -> None:
    """Kill processes, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    asked = parser.parse_args()
    tallies = uvloop.run(measure(asked.kinds or list(KINDS), asked.times))
    columns = columns_of_ends([tally.ends for tally in tallies.values()])
    shown = Table("killed", "times", *columns, "slowest round")
    for kind, tally in tallies.items():
        shown.add_row(
            kind,
            str(tally.kills),
            *(str(tally.ends[column]) for column in columns),
            f"{tally.slowest_s:.0f} s",
        )
    Console(width=160).print(shown)


if __name__ == "__main__":
    main()
