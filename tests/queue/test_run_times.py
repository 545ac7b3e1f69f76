"""Estimated waits: compared with a simulated queue, and described in words."""

from __future__ import annotations

import heapq
import random
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.queue.fair_queue import FairQueue
from ndif.queue.run_times import RunTimes, describe_wait
from tests.queue.entries import Waiting

Draw = Callable[[random.Random], float]


def measured(*runs_s: float, user: str = "ann") -> RunTimes:
    times = RunTimes()
    for ran_s in runs_s:
        times.measured(user, ran_s)
    return times


# One request


def test_no_wait_is_estimated_before_any_measurement() -> None:
    times = RunTimes()
    assert times.expected("ann") == 1.0
    assert times.wait_s(1, 1, [0.0], 0.0) is None


def test_expected_run_time_follows_user_history() -> None:
    times = RunTimes()
    for _ in range(30):
        times.measured("ann", 0.1)
        times.measured("bob", 20.0)
    assert 0.1 < times.expected("ann") < 0.5
    assert times.expected("bob") == pytest.approx(20, rel=0.2)
    assert times.expected("carol") == pytest.approx(10, rel=0.2)


def test_outlier_hardly_affects_expectation_for_new_user() -> None:
    times = measured(*[1.0] * 100, 3600.0)
    assert times.expected("bob") == pytest.approx(1.0)


def test_outlier_affects_only_waits_behind_many_requests() -> None:
    times = measured(*[1.0] * 199, 2000.0)
    near, far = (times.wait_s(place, 1, [0.0], 0.0) for place in (101, 1001))
    assert near is not None
    assert far is not None
    assert near == pytest.approx(101)
    assert far == pytest.approx(11_000, rel=0.1)


def test_old_run_times_are_forgotten() -> None:
    times = measured(*[100.0] * 300, *[1.0] * 256)
    assert times.expected("ann") == pytest.approx(1.0)
    assert times.expected("bob") == pytest.approx(1.0)


def test_number_of_remembered_users_is_bounded() -> None:
    times = RunTimes()
    for number in range(5000):
        times.measured(f"user-{number}", 1.0)
    assert len(times._users) <= 1024


# The line


def test_no_wait_is_estimated_without_replica() -> None:
    assert measured(1.0).wait_s(1, 0, [], 0.0) is None


def test_wait_is_zero_for_idle_replica() -> None:
    times = measured(*[10.0] * 9)
    assert times.wait_s(1, 2, [0.0], 0.0) == 0.0
    assert times.wait_s(2, 2, [], 0.0) == 0.0


def test_waits_are_exact_for_equal_run_times() -> None:
    times = measured(*[10.0] * 100)
    seconds = [times.wait_s(place, 2, [0.0, 4.0], 6.0) for place in range(1, 6)]
    assert seconds == pytest.approx([4, 8, 14, 18, 24])


def test_known_work_ahead_affects_estimate() -> None:
    times = measured(*[1.0] * 50, *[100.0] * 50)
    short = times.wait_s(11, 1, [0.0], 0.0, work_ahead_s=10.0)
    usual = times.wait_s(11, 1, [0.0], 0.0)
    long = times.wait_s(11, 1, [0.0], 0.0, work_ahead_s=1000.0)
    assert short is not None
    assert usual is not None
    assert long is not None
    assert short < usual / 2 < usual < long
    assert long > 900


def test_request_that_exceeds_all_run_times_is_expected_to_continue() -> None:
    wait = measured(*[1.0] * 100).wait_s(1, 1, [0.0], 60.0)
    assert wait is not None
    assert 30 <= wait <= 120


DISTRIBUTIONS: dict[str, Draw] = {
    "all alike": lambda dice: 2.0,
    "even": lambda dice: dice.uniform(1, 3),
    "exponential": lambda dice: dice.expovariate(0.5),
    "long tail": lambda dice: dice.lognormvariate(0, 1.3),
    "two kinds": lambda dice: 20.0 if dice.random() < 0.1 else 0.5,
}


@dataclass
class Told:
    """The estimated wait of an arrival, and its real wait."""

    wait: float
    real: float


def simulated(draw: Draw, replicas: int, load: float, count: int = 1000) -> list[Told]:
    """Simulate a first-come queue with Poisson arrivals and `replicas` servers (M/G/c)."""
    dice = random.Random(7)
    mean = statistics.fmean(draw(dice) for _ in range(20_000))
    times = RunTimes()
    free = [0.0] * replicas
    jobs: list[tuple[float, float]] = []  # start and end, in the order of arrival
    ended: list[tuple[float, float]] = []
    waits, now, first_waiting = [], 0.0, 0
    for _ in range(count):
        now += dice.expovariate(load * replicas / mean)
        while ended and ended[0][0] <= now:
            times.measured("ann", heapq.heappop(ended)[1])
        start = max(now, heapq.heappop(free))
        ran = draw(dice)
        heapq.heappush(free, start + ran)
        heapq.heappush(ended, (start + ran, ran))
        while first_waiting < len(jobs) and jobs[first_waiting][0] <= now:
            first_waiting += 1
        running = [began for began, end in jobs[:first_waiting][-200:] if end > now]
        wait = times.wait_s(len(jobs) - first_waiting + 1, replicas, running, now)
        if len(jobs) > 300 and start > now:
            assert wait is not None
            waits.append(Told(wait, start - now))
        jobs.append((start, start + ran))
    return waits


@pytest.mark.parametrize("load", [0.7, 0.95, 1.3])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_estimated_waits_match_simulated_queue(kind: str, replicas: int, load: float) -> None:
    waits = simulated(DISTRIBUTIONS[kind], replicas, load)
    assert len(waits) > 100
    ratios = [wait.real / max(wait.wait, 1e-9) for wait in waits]
    assert 0.67 <= statistics.median(ratios) <= 1.5


def test_estimated_waits_match_queue_of_different_users() -> None:
    """Many short jobs of one user and a few long ones of another, in a fair queue."""
    dice = random.Random(1)
    runs_s: dict[str, Draw] = {
        "ann": lambda dice: dice.lognormvariate(3, 0.5),
        "bob": lambda dice: dice.expovariate(10),
    }
    times = RunTimes()
    for user in (["ann"] + ["bob"] * 20) * 12:
        times.measured(user, runs_s[user](dice))
    line: FairQueue[Waiting] = FairQueue()
    for number, user in enumerate(["ann"] * 30 + ["bob"] * 600):
        waiting = Waiting(f"{number}", user, float(number))
        line.add(replace(waiting, cost=times.expected(waiting.user)))
    waits, ahead_s = [], 0.0
    for waiting, place in line.positions():
        waits.append(times.wait_s(place, 2, [0.0, 0.0], 0.0, ahead_s))
        ahead_s += times.expected(waiting.user)
    real, free = [], [runs_s["bob"](dice), runs_s["ann"](dice)]
    for waiting, _ in line.positions():
        start = min(free)
        free[free.index(start)] += runs_s[waiting.user](dice)
        real.append(start)
    ratios = [after / before for after, before in zip(real, waits, strict=True) if before]
    assert 0.67 <= statistics.median(ratios) <= 1.5
    assert statistics.fmean(0.33 <= ratio <= 3 for ratio in ratios) > 0.9


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=40),
    st.integers(1, 5),
    st.lists(st.floats(0, 1e4), max_size=5),
)
def test_estimated_wait_is_always_finite(
    runs_s: list[float], replicas: int, running_since: list[float]
) -> None:
    times = measured(*runs_s)
    waits = [
        times.wait_s(place, replicas, running_since[:replicas], 1e4, place * 1.0)
        for place in (1, 2, 3, 10, 100, 1000)
    ]
    for wait in waits:
        assert wait is not None
        assert 0 <= wait < float("inf")


# In words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "a moment"),
        (4.4, "about 4 seconds"),
        (12, "about 10 seconds"),
        (38, "about 40 seconds"),
        (59, "about a minute"),
        (170, "about 3 minutes"),
        (1600, "about 25 minutes"),
        (3500, "about an hour"),
        (3700, "more than an hour"),
        (2.5 * 3600, "more than 2 hours"),
        (1e6, "more than a day"),
    ],
)
def test_wait_is_described_in_words(seconds: float, words: str) -> None:
    assert describe_wait(seconds) == words


UNITS_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}


def seconds_in(words: str) -> float:
    number, unit = re.fullmatch(r"(?:about|more than) (\d+|an?) (\w+?)s?", words).groups()  # type: ignore[union-attr]
    return (int(number) if number.isdigit() else 1) * UNITS_S[unit]


@given(st.floats(3, 1e6))
def test_description_of_wait_is_accurate(seconds: float) -> None:
    words = describe_wait(seconds)
    estimated_s = seconds_in(words)
    if words.startswith("about"):
        assert seconds == pytest.approx(estimated_s, rel=0.35)
    else:
        assert estimated_s <= seconds
        assert estimated_s * 2 > seconds or estimated_s == 86400
