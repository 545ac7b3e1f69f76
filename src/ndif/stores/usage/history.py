"""The course of jobs over time: how many ended in each interval, and how long they took."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ndif.schema.job_record import JobRecord

BOUNDS_S: Sequence[float] = tuple(0.01 * 2 ** (half / 2) for half in range(43))
"""Seconds at which classes of durations begin, up to some hours: each is √2 times the previous."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The jobs that ended in one interval of time."""

    start: float
    """Unix time at which the interval begins."""
    jobs: int = 0
    errors: int = 0
    """Jobs among them that failed."""
    totals: Mapping[int, int] = field(default_factory=dict)
    """Number of jobs by the class of their seconds from arrival to end."""
    waits: Mapping[int, int] = field(default_factory=dict)
    """Number of jobs by the class of their seconds from arrival to their last dispatch."""


def class_of(seconds: float) -> int:
    """Return the class of a duration: the number of bounds that it reaches."""
    return bisect_right(BOUNDS_S, seconds)


def percentile(classes: Mapping[int, int], share: float) -> float | None:
    """Return the seconds in which `share` of the jobs were done, to the precision of a class."""
    left = share * sum(classes.values())
    for number, jobs in sorted(classes.items()):
        left -= jobs
        if left <= 0:
            return _middle(number)
    return None


def _middle(number: int) -> float:
    """Return the seconds that represent a class, the geometric mean of its bounds."""
    if number == 0:
        return BOUNDS_S[0]
    low = BOUNDS_S[number - 1]
    return low if number == len(BOUNDS_S) else math.sqrt(low * BOUNDS_S[number])


def intervals_of(records: Iterable[JobRecord], since: float, step_s: float) -> list[Interval]:
    """Return the intervals since a moment in which jobs ended, in order of time."""
    by_start: dict[float, list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.ended >= since:
            by_start[record.ended // step_s * step_s].append(record)
    return [
        Interval(
            start,
            len(jobs),
            sum(job.is_error for job in jobs),
            Counter(class_of(job.ended - job.received) for job in jobs),
            Counter(
                class_of(job.dispatched - job.received)
                for job in jobs
                if job.dispatched is not None
            ),
        )
        for start, jobs in sorted(by_start.items())
    ]
