"""A client of two servers of one model, in turns: one that trusts it, and one that does not.

Usage: strangers.py NAME TRUSTED SANDBOXED; prints one JSON object: each pair is sandboxed, trusted.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from nnsight import TransformersModel
from nnsight.schema.config import CONFIG

NAME, TRUSTED, SANDBOXED = sys.argv[1:]
PROMPT = "The Eiffel Tower is in the city of"
ROUNDS, SERIES, JOBS = 40, 8, 10
_PAUSE_S = 0.15
"""As long as a person needs at least; a runner that has run is replaced meanwhile."""

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
    """How long `run` takes against `host`."""
    CONFIG.API.HOST = host
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_turns(run: Callable[[], None]) -> list[tuple[float, float]]:
    """Rounds of sandboxed and trusted, after a few that do not count."""
    rounds = []
    for number in range(ROUNDS + 5):
        row = []
        for host in (SANDBOXED, TRUSTED):
            row.append(seconds(host, run))
            time.sleep(_PAUSE_S)
        if number >= 5:
            rounds.append((row[0], row[1]))
    return rounds


def series() -> None:
    """Jobs, one right after the other."""
    for _ in range(JOBS):
        one_layer()


def medians(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    """Of each side."""
    return statistics.median(r[0] for r in rounds), statistics.median(r[1] for r in rounds)


def main() -> None:
    """Measure everything."""
    one, many = in_turns(one_layer), in_turns(all_layers)
    pairs = [
        (JOBS / seconds(SANDBOXED, series), JOBS / seconds(TRUSTED, series)) for _ in range(SERIES)
    ]
    report = {
        "one layer": medians(one),
        # Of each round by itself: what slows the machine for a second slows both.
        "added": statistics.median(sandboxed - trusted for sandboxed, trusted in one),
        "all layers": medians(many),
        "jobs": medians(pairs),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
