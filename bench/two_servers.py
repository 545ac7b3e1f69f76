"""A client that compares two servers of one model, in alternating rounds.

Usage: two_servers.py NAME MEASURED BASELINE MEASUREMENT...; prints one JSON object. Each pair is the median
of the measured server and that of the baseline: "one layer" and "all layers" in seconds, "jobs" in jobs a
second. "added" is the median of the rounds' differences for one layer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from nnsight import TransformersModel
from nnsight.schema.config import CONFIG

NAME, MEASURED, BASELINE, *MEASUREMENTS = sys.argv[1:]
PROMPT = "The Eiffel Tower is in the city of"
ROUNDS, SERIES, JOBS = 40, 8, 10
_PAUSE_S = 0.15
"""Pause between requests, in which the server replaces the runner that served."""

CONFIG.APP.REMOTE_LOGGING = False
model = TransformersModel(NAME, task="text-generation")


def one_layer() -> None:
    """Read one layer."""
    with model.trace(PROMPT, remote=True):
        hidden = model.model.layers[5].output.save()
    assert hidden.shape[-1] == 576


def all_layers() -> None:
    """Read every layer, edit ten of them."""
    with model.trace(PROMPT, remote=True):
        hidden = [].save()
        for number, layer in enumerate(model.model.layers):
            if number % 3 == 0:
                layer.output[:, -1] *= 0.5
            hidden.append(layer.output)
    assert len(hidden) == 30


def seconds(host: str, run: Callable[[], None]) -> float:
    """Return the seconds that `run` takes against `host`."""
    CONFIG.API.HOST = host
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_turns(run: Callable[[], None]) -> list[tuple[float, float]]:
    """Return the seconds of each round on both servers, without the first five."""
    rounds = []
    for number in range(ROUNDS + 5):
        row = []
        for host in (MEASURED, BASELINE):
            row.append(seconds(host, run))
            time.sleep(_PAUSE_S)
        if number >= 5:
            rounds.append((row[0], row[1]))
    return rounds


def series() -> None:
    """Run jobs, each right after the one before."""
    for _ in range(JOBS):
        one_layer()


def medians(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of each server."""
    return statistics.median(r[0] for r in rounds), statistics.median(r[1] for r in rounds)


def main() -> None:
    """Print what was asked for."""
    report: dict[str, Any] = {}
    if "one layer" in MEASUREMENTS:
        rounds = in_turns(one_layer)
        report["one layer"] = medians(rounds)
        # Differences of each round: a disturbance of a second slows both servers.
        report["added"] = statistics.median(measured - baseline for measured, baseline in rounds)
    if "all layers" in MEASUREMENTS:
        report["all layers"] = medians(in_turns(all_layers))
    if "jobs" in MEASUREMENTS:
        rates = [
            (JOBS / seconds(MEASURED, series), JOBS / seconds(BASELINE, series))
            for _ in range(SERIES)
        ]
        report["jobs"] = medians(rates)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
