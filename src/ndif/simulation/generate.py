"""A day that might have been: requests with the shape of a research server's, and a cluster for them.

The rate rises and falls with the hour. A few models are asked for most (Zipf). Run times have a long tail
(log-normal), and a pace of each model's own. Users come in bursts, each for one model: somebody tries
something, looks at it, and tries again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate

from ndif.schema.deployment_settings import key_of
from ndif.schema.model_key import ModelKey
from ndif.simulation.trace import TraceRequest

DAY_S = 86400.0
_BUSIEST_S = 15 * 3600.0
_SWING = 0.75
"""By which part of its mean the rate rises, and falls."""
_POPULARITY = 1.1
"""Zipf's exponent."""
_BURST = 12.0
"""Requests of a burst, the mean."""
_PAUSE_S = 40.0
"""Between two of them, the mean."""
_RUN_S = 1.5
"""The median."""
_SPREAD = 1.4
"""The standard deviation of a run time's logarithm; and that of a model's pace."""
_PACES = 0.7
_LONGEST_RUN_S = 1800.0
_PRIORITY = 0.02
_EARLIER = 0.1
"""The part of bursts whose client is of the generation before."""
_FAMILIES = ("pythia", "qwen", "llama", "gemma", "mistral", "olmo", "falcon", "bloom", "phi", "opt")
_SIZES_GB = (0.5, 1.5, 3, 6, 14, 16, 28, 64, 140, 460)
_SHARES = (8, 12, 14, 14, 14, 14, 10, 8, 5, 1)
"""How many models in a hundred are of each size."""


def names(count: int) -> list[str]:
    """Repo ids of that many models, the most popular first."""
    return [f"lab-{n % 17}/{_FAMILIES[n % len(_FAMILIES)]}-{n:03d}" for n in range(count)]


def cluster(models: Sequence[str], seed: int) -> str:
    """A cluster file for these models, the most popular first: the first two are dedicated."""
    dice = random.Random(f"{seed} cluster")  # noqa: S311 - no secret
    lines = [
        "# What a cluster file may say besides: docs/simulation.md.",
        "nodes:",
        "  - {name: a100, gpus: 8x80GiB, cpu_memory: 1TiB, count: 6}",
        "rules:",
        "  minimum_deployment_time: 15m",
        "models:",
    ]
    for rank, name in enumerate(models):
        (gigabytes,) = dice.choices(_SIZES_GB, _SHARES)
        settings = f"size: {gigabytes:g}GB"
        lines.append(f"  {name}: {{{settings}{', dedicated: true' if rank < 2 else ''}}}")
    return "\n".join(lines) + "\n"


def trace(
    models: Sequence[str], requests: int, seed: int, *, users: int = 500, length_s: float = DAY_S
) -> list[TraceRequest]:
    """That many requests for these models, the most popular first; the same for the same seed."""
    dice = random.Random(f"{seed} trace")  # noqa: S311 - no secret
    keys = [key_of(name) for name in models]
    popularity = list(accumulate(1 / rank**_POPULARITY for rank in range(1, len(keys) + 1)))
    medians_s = {key: _RUN_S * math.exp(dice.gauss(0, _PACES)) for key in keys}
    found: list[TraceRequest] = []
    while len(found) < requests:
        (key,) = dice.choices(keys, cum_weights=popularity)
        count = min(1 + int(dice.expovariate(1 / (_BURST - 1))), requests - len(found))
        user = f"user-{dice.randrange(users)}"
        begin = _begin(dice, length_s)
        found += _burst(dice, begin, length_s, key, user, medians_s[key], count)
    found.sort(key=lambda request: request.at)
    return found


def _begin(dice: random.Random, length_s: float) -> float:
    """A time at which a burst begins: likelier where the day is busier."""
    while True:
        at = dice.uniform(0, length_s)
        rate = 1 + _SWING * math.cos(2 * math.pi * (at - _BUSIEST_S) / DAY_S)
        if dice.uniform(0, 1 + _SWING) < rate:
            return at


def _burst(
    dice: random.Random,
    begin: float,
    length_s: float,
    key: ModelKey,
    user: str,
    median_s: float,
    count: int,
) -> list[TraceRequest]:
    generation = "0.7" if dice.random() < _EARLIER else "0.8"
    priority = dice.random() < _PRIORITY
    requests, at = [], begin
    for _ in range(count):
        run_s = min(median_s * math.exp(dice.gauss(0, _SPREAD)), _LONGEST_RUN_S)
        requests.append(
            TraceRequest(
                # What goes on beyond the end belongs to the beginning, as on any other day.
                at=round(at % length_s, 3),
                model=key,
                user=user,
                run_s=round(run_s, 3),
                generation=generation,
                priority=priority,
            )
        )
        at += dice.expovariate(1 / _PAUSE_S)
    return requests
