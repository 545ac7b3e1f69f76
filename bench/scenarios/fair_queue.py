"""The cost of fair queueing: 10,000 requests of 500 users wait for one model."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.figures import Figure
from bench.scenario import Site
from ndif.queue.fair_queue import FairQueue

_WAITING = 10_000
_USERS = 500
_ROUNDS = 20
_PAIRS = 1_000


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A waiting request with only the fields that scheduling needs."""

    id: str
    user: str
    arrived: float
    weight: float
    priority: bool
    cost: float


def measure(_: Site) -> list[Figure]:
    """Measure an add and take of one entry, and the positions of all entries."""
    entries = _entries()
    full: FairQueue[_Waiting] = FairQueue()
    for entry in itertools.islice(entries, _WAITING):
        full.add(entry)
    pairs = []
    for _ in range(_ROUNDS):
        new = list(itertools.islice(entries, _PAIRS))
        began = time.perf_counter()
        for entry in new:
            full.add(entry)
            full.take()
        pairs.append((time.perf_counter() - began) / _PAIRS)
    walks = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        assert len(full.positions()) == _WAITING
        walks.append(time.perf_counter() - began)
    how = f"median of {_ROUNDS}, {_WAITING:,} waiting from {_USERS} users"
    return [
        Figure("queue: add and take one", statistics.median(pairs) * 1e6, 50, "us", how=how),
        Figure("queue: all positions", statistics.median(walks) * 1e3, 60, "ms", how=how),
    ]


def _entries() -> Iterator[_Waiting]:
    dice = random.Random(0)
    for number in itertools.count():
        yield _Waiting(
            id=f"request-{number}",
            user=f"user-{dice.randrange(_USERS)}",
            arrived=float(number),
            weight=dice.choice([1.0, 1.0, 2.0, 4.0]),
            priority=dice.random() < 0.05,
            cost=dice.expovariate(1.0),
        )
