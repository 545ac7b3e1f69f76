"""`make bench`: measure, compare each figure with its limit, print a table, write JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.accounts import accounts
from bench.cluster import cluster
from bench.control import control
from bench.dashboard import dashboard
from bench.fair_queue import fair_queue
from bench.figures import MB, Figure, table
from bench.hostile import hostile
from bench.placement import placement
from bench.processes import (
    CACHE,
    NDIF,
    Watch,
    client,
    held_weights,
    instant,
    older_runtime,
    resident,
    server,
)
from bench.replicas import replicas
from bench.sandbox import per_user, sandbox
from bench.simulate import simulate
from bench.telemetry import telemetry
from bench.usage import usage
from bench.warm import warm
from ndif.config.units import parse_duration
from prepare_model import prepare  # an example; `bench.processes` puts its folder on the path


def loop_seconds() -> float:
    """Return the seconds of a loop of five million steps, the median of seven.

    Two runs are comparable only if this is the same: a shared machine's speed changes.
    """
    took = []
    for _ in range(7):
        began = time.perf_counter()
        total = 0
        for number in range(5_000_000):
            total += number
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def help_seconds() -> float:
    """Return the seconds that `ndif --help` takes, the median of seven."""
    took = []
    for _ in range(7):
        began = time.perf_counter()
        subprocess.run([NDIF, "--help"], check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure(raw: dict[str, object]) -> Iterator[Figure]:
    """Measure every figure; put the numbers behind them into `raw`."""
    folder = prepare(CACHE / "smollm2-135m")
    environment = {**os.environ, **older_runtime()}
    yield Figure("ndif --help", help_seconds(), 0.4, "s", how="median of 7")
    yield from one_server(folder, environment, raw)
    yield from sandbox(folder, environment)
    yield from per_user(folder, environment)
    yield from replicas(folder, environment)
    yield from fair_queue()
    yield from placement()
    yield from warm(folder, environment)
    yield from hostile(folder, environment)
    yield from control()
    yield from accounts()
    yield from telemetry(folder, environment)
    yield from dashboard(folder, environment)
    yield from usage(seconds=30)
    yield from simulate()
    yield from cluster(folder, environment)


def one_server(
    folder: Path, environment: dict[str, str], raw: dict[str, object]
) -> Iterator[Figure]:
    """Measure a trusting server and its results beside the instant server."""
    with tempfile.TemporaryDirectory() as scratch, server(folder, environment) as (url, pid, said):
        ready = Path(scratch)
        yield Figure(
            "idle server without a model", resident(pid) / MB, 120, "MB", how="control plane"
        )
        after = re.search(r"ready (\S+) later", said)
        assert after
        yield Figure("ready after the weights are loaded", parse_duration(after[1]), 3, "s")
        for generation, limit_ms in (("0.8", 8.0), ("0.7", 12.0)):
            with instant(ready) as floor:
                watch = Watch(pid)
                out = client("client.py", generation, url, str(folder), url, floor, str(ready))
                report = json.loads(out.stdout.splitlines()[-1])
                growth = watch.stop()
            raw[generation] = report
            small = report["small"]
            share = report["share"] * 1e3
            how = (
                f"remote {small['server'] * 1e3:.1f} - in process {small['local'] * 1e3:.1f} "
                f"- client floor {small['instant'] * 1e3:.1f} ms"
            )
            name = f"server's share of a small trace, {generation}"
            yield Figure(name, share, limit_ms, "ms", how=how)
            for size in (64, 256):
                large = report[f"large-{size}"]
                ratio = large["instant"] / large["server"]
                how = (
                    f"{size / large['server']:.0f} MB/s beside {size / large['instant']:.0f}; "
                    f"stored {large['stored'] / MB:.0f} MB"
                )
                name = f"{size} MB bfloat16, {generation}: rate / instant"
                yield Figure(name, ratio, 0.6, "x", at_most=False, how=how)
            if generation != "0.8":
                held = held_weights(pid, (folder / "model.safetensors").stat().st_size)
                how = "in the processes of two generations, which should share one"
                yield Figure("copies of the weights", held, 1.1, "x", how=how)
            name = f"copies of a 256 MB result in one process, {generation}"
            how = (
                "largest growth of a process's anonymous memory; the values themselves are one copy"
            )
            yield Figure(name, growth / (256 * MB), 2.0, "x", how=how)


def main() -> None:
    """Measure, print a table and write JSON; exit 1 if a limit does not hold."""
    raw: dict[str, object] = {}
    figures = []
    for figure in measure(raw):
        print(figure, flush=True)
        figures.append(figure)
    shown = table("ndif", figures)
    shown.caption = f"a loop of five million steps takes {loop_seconds():.2f} s on this machine now"
    Console().print(shown)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    report = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "figures": [{**asdict(figure), "holds": figure.holds} for figure in figures],
        "raw": raw,
    }
    (results / "latest.json").write_text(json.dumps(report, indent=1) + "\n")
    if not all(figure.holds for figure in figures):
        raise SystemExit(1)


main()
