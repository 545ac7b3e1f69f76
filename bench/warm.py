"""The time from WARM to HOT, compared to a load from disk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.figures import Figure
from bench.processes import NDIF
from prepare_model import NAME  # an example; `bench.processes` puts its folder on the path

_ROUNDS = 5
_PATIENCE_S = 120
_SETTLED_S = 1.0


def warm(folder: Path, environment: Mapping[str, str]) -> list[Figure]:
    """Measure WARM to HOT and COLD to HOT, on the CPU."""
    with _operator(environment) as ask:
        deployment = {"repo_id": NAME, "checkpoint": str(folder), "device": "cpu"}
        cold, returns = [], []
        for _ in range(2):
            cold.append(_deploy(ask, deployment))
            for _ in range(_ROUNDS):
                ask("/admin/evict", {"model": NAME})
                time.sleep(_SETTLED_S)
                returns.append(_deploy(ask, deployment))
            ask("/admin/evict", {"model": NAME, "cold": True})
            time.sleep(_SETTLED_S)
    # The second load knows its size already, and finds its files in the page cache.
    load_s, return_s = min(cold), statistics.median(returns)
    return [
        Figure(
            "WARM to HOT / COLD to HOT",
            100 * return_s / load_s,
            5,
            "%",
            how=f"CPU: {return_s * 1e3:.0f} ms (median of {len(returns)}) beside {load_s:.1f} s",
        )
    ]


def _deploy(ask: Any, deployment: Mapping[str, str]) -> float:
    """Return the seconds until a deployment serves."""
    began = time.perf_counter()
    answer = ask("/admin/deploy", {"deployments": [deployment], "wait": True})
    took = time.perf_counter() - began
    if problem := answer["models"][0]["problem"]:
        raise RuntimeError(problem)
    return took


@contextlib.contextmanager
def _operator(environment: Mapping[str, str]) -> Iterator[Any]:
    """Run `ndif start`; the value sends a request to its operator API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as root:
        process = subprocess.Popen(
            [NDIF, "start", "--port", str(port)],
            env={**os.environ, **environment, "NDIF_SESSION_ROOT": root, "NDIF_DEV_MODE": "true"},
            stderr=subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{port}"
        token = Path(root, "current", "token")

        def ask(path: str, body: Mapping[str, Any]) -> Any:
            headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
            request = urllib.request.Request(
                url + path, json.dumps(body).encode(), headers, method="POST"
            )
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                return json.load(answer)

        try:
            wait_for(f"{url}/ping")
            yield ask
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def wait_for(url: str) -> None:
    """Return once an address answers."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
