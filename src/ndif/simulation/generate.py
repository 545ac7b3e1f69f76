"""Generated requests that resemble a day of a research server, and a cluster for them.

The rate rises and falls with the hour. A few models get most requests (Zipf). Run times have a long tail
(log-normal) and a median for each model. Users send bursts of requests for one model, because they
experiment: they run a request, look at the result, and run the next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate

from ndif.schema.deployment_settings import parse_model
from ndif.simulation.trace import TraceRequest

DAY_S = 86400.0
_BUSIEST_S = 15 * 3600.0
_SWING = 0.75
"""Amplitude of the rate, as a fraction of the mean rate."""
_POPULARITY = 1.1
"""Exponent of the Zipf distribution."""
_BURST = 12.0
"""Mean number of requests in a burst."""
_PAUSE_S = 40.0
"""Mean seconds between two requests of a burst."""
_RUN_S = 1.5
"""Median of run times, in seconds."""
_SPREAD = 1.4
"""Standard deviation of the logarithm of run times."""
_PACES = 0.7
"""Standard deviation of the logarithm of models' medians."""
_LONGEST_RUN_S = 1800.0
_PRIORITY = 0.02
_EARLIER = 0.1
"""Fraction of bursts that clients of the previous generation send."""
_FAMILIES = ("pythia", "qwen", "llama", "gemma", "mistral", "olmo", "falcon", "bloom", "phi", "opt")
_SIZES_GB = (0.5, 1.5, 3, 6, 14, 16, 28, 64, 140, 460)
_SHARES = (8, 12, 14, 14, 14, 14, 10, 8, 5, 1)
"""Percentage of models of each size."""


def names(count: int) -> list[str]:
    """Return `count` repository ids, the most popular first."""
    return [f"lab-{n % 17}/{_FAMILIES[n % len(_FAMILIES)]}-{n:03d}" for n in range(count)]


def cluster(models: Sequence[str], seed: int) -> str:
    """Return a cluster file for these models, the most popular first; the first two are dedicated."""
    rng = random.Random(f"{seed} cluster")  # noqa: S311 - no secret
    lines = [
        "# For all fields of a cluster file, see docs/simulation.md.",
        "nodes:",
        "  - {name: a100, gpus: 8x80GiB, cpu_memory: 1TiB, count: 6}",
        "rules:",
        "  minimum_deployment_time: 15m",
        "models:",
    ]
    for rank, name in enumerate(models):
        (gigabytes,) = rng.choices(_SIZES_GB, _SHARES)
        settings = f"size: {gigabytes:g}GB"
        lines.append(f"  {name}: {{{settings}{', dedicated: true' if rank < 2 else ''}}}")
    return "\n".join(lines) + "\n"


def trace(
    models: Sequence[str], requests: int, seed: int, *, users: int = 500, length_s: float = DAY_S
) -> list[TraceRequest]:
    """Return `requests` requests for `models`, the most popular first; equal seeds give equal results."""
    rng = random.Random(f"{seed} trace")  # noqa: S311 - no secret
    keys = [parse_model(name) for name in models]
    popularity = list(accumulate(1 / rank**_POPULARITY for rank in range(1, len(keys) + 1)))
    medians_s = {key: _RUN_S * math.exp(rng.gauss(0, _PACES)) for key in keys}
    drawn: list[TraceRequest] = []
    while len(drawn) < requests:
        (key,) = rng.choices(keys, cum_weights=popularity)
        count = min(1 + int(rng.expovariate(1 / (_BURST - 1))), requests - len(drawn))
        user = f"user-{rng.randrange(users)}"
        at = _begin(rng, length_s)
        generation = "0.7" if rng.random() < _EARLIER else "0.8"
        priority = rng.random() < _PRIORITY
        for _ in range(count):
            run_s = min(medians_s[key] * math.exp(rng.gauss(0, _SPREAD)), _LONGEST_RUN_S)
            # A burst that passes the end continues at the beginning, like a burst of the previous day.
            begin, run_s = round(at % length_s, 3), round(run_s, 3)
            drawn.append(
                TraceRequest(begin, key, user, run_s, generation=generation, priority=priority)
            )
            at += rng.expovariate(1 / _PAUSE_S)
    drawn.sort(key=lambda request: request.at)
    return drawn


def _begin(rng: random.Random, length_s: float) -> float:
    """Return the time at which a burst begins; busy hours are more likely."""
    while True:
        at = rng.uniform(0, length_s)
        rate = 1 + _SWING * math.cos(2 * math.pi * (at - _BUSIEST_S) / DAY_S)
        if rng.uniform(0, 1 + _SWING) < rate:
            return at
