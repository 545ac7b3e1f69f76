"""The time to simulate a day: 100,000 requests for hundreds of models."""

from __future__ import annotations

import statistics
import time

from bench.figures import Figure
from bench.scenario import Site
from ndif.simulation import generate
from ndif.simulation.report import report
from ndif.simulation.run import run
from ndif.simulation.world import read

_REQUESTS = 100_000
_MODELS = 300
_LIMIT_S = 60.0


def measure(_: Site) -> list[Figure]:
    """Measure one day, with its report."""
    names = generate.names(_MODELS)
    world = read(generate.cluster(names, seed=0), "cluster.yaml")
    trace = generate.trace(names, _REQUESTS, seed=0)
    began = time.perf_counter()
    journal = run(world, trace)
    overall = report(world, journal, seed=0)["overall"]
    took_s = time.perf_counter() - began
    if overall["unfinished"] or overall["completed"] < 0.9 * _REQUESTS:
        raise RuntimeError(f"Too many requests did not complete: {overall}.")
    run_s = statistics.fmean(request.run_s for request in trace)
    return [
        Figure(
            "a simulated day",
            took_s,
            _LIMIT_S,
            "s",
            how=f"{_REQUESTS:,} requests of {run_s:.1f} s for {_MODELS} models on "
            f"{len(world.nodes)} nodes; {overall['cold_loads']:,} cold loads, "
            f"{overall['warm_returns']:,} warm returns",
        )
    ]
