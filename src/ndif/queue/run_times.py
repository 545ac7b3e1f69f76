"""Run times of one model's requests, and the waits of its queue that follow from them.

Run times have long tails: one job of an hour among hundreds of a second says little about the next ten and
much about the next thousand. So a sum of n run times is not n means. An estimate for n run times is
winsorised at the quantile that n draws more likely than not stay below: larger values count as that
quantile. n = 1 gives about the median, and a large n the mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from operator import mul

_WINDOW = 256
_USERS = 1024
_USER_WINDOW = 32
_PRIOR = 1
"""Number of a user's own run times that count as much as the mean of all users."""
_UNMEASURED_S = 1.0
_LEAST_S = 1e-6
"""Least run time in seconds: a divisor."""
_OUTLIERS = 0.05


class _Window:
    """The most recent values of one kind, and estimates of the next."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._winsorised: dict[int, tuple[float, float]] = {}
        """Mean and standard deviation, by the number of values that are not cut down."""

    def add(self, value: float) -> None:
        """Add a value; drop the oldest beyond the window."""
        self._recent.append(value)
        insort(self._sorted, value)
        if len(self._recent) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._winsorised.clear()

    def __len__(self) -> int:
        return len(self._recent)

    def beyond(self, reached: float, quantile: float) -> float:
        """Return the expected rest, at a quantile, of a value that has reached `reached`."""
        first = bisect_right(self._sorted, reached)
        larger = len(self._sorted) - first
        if not larger:
            # No value was larger: the rest is likely as long again, as for durations without a scale of
            # their own.
            return reached * quantile / (1 - quantile)
        return self._sorted[first + min(int(larger * quantile), larger - 1)] - reached

    def winsorised(self, tail: float) -> tuple[float, float]:
        """Return mean and standard deviation; the top share `tail` is cut to the largest other value."""
        count = len(self._sorted)
        kept = max(count - int(tail * count), 1)
        if kept not in self._winsorised:
            below, top, cut = self._sorted[:kept], self._sorted[kept - 1], count - kept
            mean = (sum(below) + cut * top) / count
            square = (sum(map(mul, below, below)) + cut * top * top) / count
            self._winsorised[kept] = mean, math.sqrt(max(square - mean * mean, 0.0))
        return self._winsorised[kept]


class RunTimes:
    """The most recent run times of one model, of all users together and of each."""

    def __init__(self) -> None:
        self._runs = _Window()
        self._errors = _Window()  # run times, divided by their estimates
        self._users: OrderedDict[str, deque[float]] = OrderedDict()

    def measured(self, user: str, ran_s: float) -> None:
        """Add the run time of a user's request."""
        ran_s = max(ran_s, _LEAST_S)
        if self._runs:
            self._errors.add(ran_s / self.expected(user))
        self._runs.add(ran_s)
        own = self._users.setdefault(user, deque(maxlen=_USER_WINDOW))
        own.append(ran_s)
        self._users.move_to_end(user)
        if len(self._users) > _USERS:
            self._users.popitem(last=False)

    def expected(self, user: str) -> float:
        """Estimate the run time in seconds of a user's request; 1 before any was measured."""
        if not self._runs:
            return _UNMEASURED_S
        model_mean, _ = self._runs.winsorised(_OUTLIERS)
        # The user's own mean keeps outliers, since other users wait for them.
        own = self._users.get(user, ())
        return (_PRIOR * model_mean + math.fsum(own)) / (_PRIOR + len(own))

    def wait_s(
        self,
        position: int,
        replicas: int,
        running_since: Sequence[float],
        now: float,
        work_ahead_s: float | None = None,
    ) -> float | None:
        """Estimate the median of the seconds until the entry at `position` (from 1) is taken.

        `work_ahead_s`: sum of `expected` over the entries ahead; by default the model's usual run times.
        None without a measured run time, or without replicas that serve: their time to load is unknown.
        """
        if not self._runs or replicas < 1:
            return None
        ahead = position - 1
        if ahead < replicas - len(running_since):
            return 0.0
        draws, unit_s = self._runs, 1.0
        if ahead and work_ahead_s is not None and self._errors:
            draws, unit_s = self._errors, work_ahead_s / ahead
        each_s = draws.winsorised(1 - 0.5 ** (1 / max(ahead, 1)))[0] * unit_s
        mean, deviation = self._runs.winsorised(_OUTLIERS)
        variation = min(deviation / mean, 1.0)
        ages = [max(now - since, 0.0) for since in running_since]
        idle = [0.0] * (replicas - len(ages))
        early, ends, late = (
            sorted(idle + [self._runs.beyond(age, at) for age in ages]) for at in (0.1, 0.5, 0.9)
        )
        # 1 where the ends are certain, and near 0 where they may be at any time.
        certainty = sum(early) / sum(late) if any(late) else 1.0
        count = len(ends)
        # Equal run times end in the order they began, each on its replica; memoryless ones end anywhere,
        # and the queue moves by one whenever any does.
        first_s = certainty * ends[0] + (1 - certainty) * sum(ends) / count**2
        equal_s = ends[ahead % count] - ends[0] + ahead // count * each_s
        return first_s + (1 - variation) * equal_s + variation * ahead * each_s / count


def describe_wait(seconds: float) -> str:
    """Return a wait in words, such as "about 40 seconds"."""
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
