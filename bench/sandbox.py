"""The cost of the sandbox: one model, served trusted and sandboxed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figures import MB, Figure
from bench.processes import NAME, NDIF, client, descendants, proportional, server
from bench.warm import wait_for

_SETTLED_S = 3.0


def sandbox(folder: Path, environment: dict[str, str]) -> list[Figure]:
    """Measure latency, throughput and memory, trusted and sandboxed in alternating rounds."""
    with (
        server(folder, environment) as (trusted, _, _),
        server(folder, environment, "--sandbox") as (sandboxed, _, _),
    ):
        measurements = ("one layer", "all layers", "jobs")
        out = client("two_servers.py", "0.8", trusted, sandboxed, trusted, *measurements)
        report = json.loads(out.stdout.splitlines()[-1])
    # On its own: a page that another server maps too would count in part.
    with server(folder, environment, "--sandbox") as (_, pid, _):
        added = waiting_runner(pid)

    def pair(name: str, unit: str, scale: float) -> str:
        sandboxed, trusted = report[name]
        return f"sandboxed {sandboxed * scale:.1f}, trusted {trusted * scale:.1f} {unit}"

    many, rate = report["all layers"], report["jobs"]
    return [
        Figure(
            "sandboxed - trusted, one layer",
            report["added"] * 1e3,
            10,
            "ms",
            how=pair("one layer", "ms", 1e3),
        ),
        Figure(
            "sandboxed / trusted, 30 reads and 10 edits",
            many[0] / many[1],
            1.05,
            "x",
            how=pair("all layers", "ms", 1e3),
        ),
        Figure(
            "sandboxed / trusted jobs a second, one client",
            rate[0] / rate[1],
            0.9,
            "x",
            at_most=False,
            how=pair("jobs", "jobs/s", 1),
        ),
        Figure(
            "a waiting runner adds", added / MB, 40, "MB", how="PSS of the tree, with and without"
        ),
    ]


_KEYS = [f"key-{number}-of-the-benchmark" for number in range(8)]


def per_user(folder: Path, environment: dict[str, str]) -> list[Figure]:
    """Measure jobs a second of one key, of eight keys in turn, and of one that is trusted."""
    with contextlib.ExitStack() as servers:
        trusted_url, user_url, request_url = (
            servers.enter_context(keyed(folder, environment, *way))
            for way in (("[trusted]", "user"), ("[]", "user"), ("[]", "request"))
        )
        series = [
            f"{','.join(keys)}@{url}"
            for keys, url in (
                (_KEYS[:1], trusted_url),
                (_KEYS[:1], user_url),
                (_KEYS, user_url),
                (_KEYS[:1], request_url),
            )
        ]
        out = client("keyed.py", "0.8", user_url, *series)
    trusted, one, eight, request = json.loads(out.stdout.splitlines()[-1])
    how = f"{one:.1f}, trusted {trusted:.1f}, a process a job {request:.1f} jobs/s"
    return [
        Figure(
            "jobs a second of one key / trusted", one / trusted, 0.9, "x", at_most=False, how=how
        ),
        Figure(
            "jobs a second of eight keys in turn / trusted",
            eight / trusted,
            0.75,
            "x",
            at_most=False,
            how=f"{eight:.1f} jobs/s",
        ),
    ]


@contextlib.contextmanager
def keyed(folder: Path, environment: dict[str, str], tags: str, scope: str) -> Iterator[str]:
    """Run `ndif start` with the keys on the demo model; the value is its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as root:
        keys = Path(root, "keys.yaml")
        lines = [f"  - {{key: {key}, tags: {tags}}}\n" for key in _KEYS]
        keys.write_text("keys:\n" + "".join(lines))
        process = subprocess.Popen(
            [NDIF, "start", "--port", str(port), f"{NAME}={folder}"],
            env={
                **environment,
                "NDIF_SESSION_ROOT": root,
                "NDIF_API_KEYS": str(keys),
                "NDIF_RUNNER_SCOPE": scope,
                "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
            },
            stderr=subprocess.DEVNULL,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            # The hub serves a model's files once the model is loaded.
            wait_for(f"{url}/hub/api/models/{NAME}")
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def waiting_runner(pid: int) -> int:
    """Return the bytes that a server's processes release when one waiting runner ends."""
    time.sleep(_SETTLED_S)
    before = proportional(pid)
    # The youngest process is a runner; the server replaces a lost runner only when it needs one.
    youngest = max(descendants(pid), key=started)
    os.kill(youngest, signal.SIGKILL)
    while alive(youngest):
        time.sleep(0.01)
    return before - proportional(pid)


def started(pid: int) -> int:
    """Return the start time of a process, in ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def alive(pid: int) -> bool:
    """Return True if a process exists."""
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False
