"""RunTimes: how long one model's requests run, and how long those in line will wait.

Run times have long tails: one job of an hour among hundreds of a second says little about the next ten
and much about the next thousand. So a sum of n run times is not n means. Beyond the quantile that more
likely than not none of n draws reaches, values count as that quantile (they are winsorised there): n = 1
gives about the median, and n without end the mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from ndif.queue.line import Entry

_WINDOW = 256
_USERS = 1024
_USER_WINDOW = 32
_PRIOR = 1
"""How many of a user's own run times count as much as everybody's."""
_UNMEASURED_S = 1.0
_LEAST_S = 1e-6
"""So that no run time is nothing, and one may divide by it."""
_OUTLIERS = 0.05
_SPREAD = 1.28
"""Standard deviations from the middle to where one in ten lies outside."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds until an entry is taken: as likely more as less, and four times in five between the ends."""

    seconds: float
    low: float
    high: float


class _Window:
    """The last numbers of some kind, and what they say of the next."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._sums: tuple[list[float], list[float]] | None = None

    def add(self, value: float) -> None:
        """Learn one more, and forget the oldest of too many."""
        self._recent.append(value)
        insort(self._sorted, value)
        if len(self._recent) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._sums = None

    def __len__(self) -> int:
        return len(self._recent)

    def beyond(self, reached: float, quantile: float) -> float:
        """How much more there is to one that has reached so much."""
        first = bisect_right(self._sorted, reached)
        larger = len(self._sorted) - first
        if not larger:
            # None ever was: likely as much again, as with durations that have no scale of their own.
            return reached * quantile / (1 - quantile)
        return self._sorted[first + min(int(larger * quantile), larger - 1)] - reached

    def winsorised(self, tail: float) -> tuple[float, float]:
        """Mean and standard deviation where the highest `tail` (a share) count as what lies below."""
        if self._sums is None:
            squared = map(mul, self._sorted, self._sorted)
            self._sums = (
                list(accumulate(self._sorted, initial=0.0)),
                list(accumulate(squared, initial=0.0)),
            )
        sums, squares = self._sums
        count = len(self._sorted)
        kept = max(count - int(tail * count), 1)
        top, cut = self._sorted[kept - 1], count - kept
        mean = (sums[kept] + cut * top) / count
        return mean, math.sqrt(max((squares[kept] + cut * top * top) / count - mean * mean, 0.0))


class RunTimes:
    """The last run times of one model, of everybody and of each user."""

    def __init__(self) -> None:
        self._runs = _Window()
        self._errors = _Window()  # run times, in units of what had been expected
        self._users: OrderedDict[str, deque[float]] = OrderedDict()

    def measured(self, entry: Entry[Any], ran_s: float) -> None:
        """Learn how long a request ran."""
        ran_s = max(ran_s, _LEAST_S)
        if self._runs:
            self._errors.add(ran_s / self.expected(entry))
        self._runs.add(ran_s)
        mine = self._users.setdefault(entry.user, deque(maxlen=_USER_WINDOW))
        mine.append(ran_s)
        self._users.move_to_end(entry.user)
        if len(self._users) > _USERS:
            self._users.popitem(last=False)

    def expected(self, entry: Entry[Any]) -> float:
        """Seconds that an entry is likely to run, by its user's past and everybody's; 1 before any."""
        if not self._runs:
            return _UNMEASURED_S
        everybody, _ = self._runs.winsorised(_OUTLIERS)
        # A user's own mean, outliers and all: they are what others wait for.
        mine = self._users.get(entry.user, ())
        return (_PRIOR * everybody + math.fsum(mine)) / (_PRIOR + len(mine))

    def wait(
        self,
        position: int,
        replicas: int,
        running_since: Sequence[float],
        now: float,
        work_ahead_s: float | None = None,
    ) -> Wait | None:
        """Seconds until the entry at `position` (from 1) is taken; None while nothing was measured.

        `running_since` says when each running request began; `work_ahead_s` is the sum of `expected`
        over those ahead, without which they count as what this model usually runs. None, too, without
        replicas: how long they take to come is not known here.
        """
        if not self._runs or replicas < 1:
            return None
        ahead = position - 1
        if ahead < replicas - len(running_since):
            return Wait(0.0, 0.0, 0.0)
        draws, unit_s = self._runs, 1.0
        if ahead and work_ahead_s is not None and self._errors:
            draws, unit_s = self._errors, work_ahead_s / ahead
        likely, spread = draws.winsorised(1 - 0.5 ** (1 / max(ahead, 1)))
        most, most_spread = draws.winsorised(1 - 0.9 ** (1 / max(ahead, 1)))
        usual, unlike = self._runs.winsorised(_OUTLIERS)
        variation = min(unlike / usual, 1.0)
        ages = [max(now - since, 0.0) for since in running_since]
        idle = [0.0] * (replicas - len(ages))
        left = {
            at: sorted(idle + [self._runs.beyond(age, at) for age in ages])
            for at in (0.1, 0.5, 0.9)
        }
        # 1 where it is certain when each will end, and little where it may be any time.
        known = sum(left[0.1]) / sum(left[0.9]) if any(left[0.9]) else 1.0

        def until(at: float, mean: float, deviation: float) -> float:
            ends, each = left[at], mean * unit_s
            count = len(ends)
            # Run times that are all alike end in the order they began, each on its replica; times as
            # random as decay end anywhere, and the line moves by one whenever any does.
            first = known * ends[0] + (1 - known) * sum(ends) / count**2
            alike = ends[ahead % count] - ends[0] + ahead // count * each
            others = (1 - variation) * alike + variation * ahead * each / count
            return first + others + deviation * unit_s * math.sqrt(ahead) / count

        seconds = until(0.5, likely, 0.0)
        # Few measurements may all be unlike the next, and what is expected of a user rests on few.
        doubt = 1 + 1 / math.sqrt(min(len(draws), _WINDOW if draws is self._runs else _USER_WINDOW))
        low = max(until(0.1, likely, -_SPREAD * spread), 0.0) / doubt
        high = until(0.9, most, _SPREAD * most_spread) * doubt
        return Wait(seconds, min(low, seconds), max(high, seconds))


def describe_wait(seconds: float) -> str:
    """A wait in a user's words: "about 40 seconds"."""
    if seconds < 3:
        return "a moment"
    if seconds < 55:
        step = 1 if seconds < 10 else 5 if seconds < 30 else 10
        return f"about {round(seconds / step) * step} seconds"
    if seconds < 90:
        return "about a minute"
    minutes = seconds / 60
    if minutes < 57.5:
        return f"about {round(minutes) if minutes < 10 else round(minutes / 5) * 5} minutes"
    if minutes <= 60:
        return "about an hour"
    hours = int(minutes // 60)
    if hours < 24:
        return f"more than {'an hour' if hours == 1 else f'{hours} hours'}"
    return "more than a day"
