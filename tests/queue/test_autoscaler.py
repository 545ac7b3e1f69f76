"""The number of replicas: it grows with waits, shrinks when idle, and does not oscillate."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndif.queue.autoscaler import (
    Autoscaler,
    Bounds,
    QueueLoad,
    ScalingState,
    desired,
    median_wait,
)
from tests.fuzzing import examples

BOUNDS = Bounds(least=1, most=4, target_wait_s=30, idle_s=300, cooldown_s=60, backoff_s=30)


def long_wait(replicas: int, **kwargs: bool) -> QueueLoad:
    return QueueLoad(replicas, busy=replicas, waiting=9, waited_s=99.0, **kwargs)


def nobody(replicas: int) -> QueueLoad:
    return QueueLoad(replicas, busy=0)


# Up


def test_long_wait_adds_one_replica() -> None:
    assert Autoscaler(BOUNDS, 1).step(long_wait(1), 0.0) == 2


def test_wait_within_target_adds_no_replica() -> None:
    scaler = Autoscaler(BOUNDS, 1)
    assert scaler.step(QueueLoad(1, busy=1, waiting=9, waited_s=29.0), 0.0) == 1


def test_replicas_are_added_one_per_cooldown() -> None:
    scaler = Autoscaler(BOUNDS, 1)
    assert [scaler.step(long_wait(2 if now else 1), now) for now in (0.0, 30.0, 59.0, 60.0)] == [
        2,
        2,
        2,
        3,
    ]


def test_autoscaler_waits_for_loading_replica() -> None:
    scaler = Autoscaler(BOUNDS, 1)
    for now in range(0, 1000, 10):
        assert scaler.step(long_wait(1), float(now)) == 2
    assert scaler.step(long_wait(2), 1000.0) == 3


def test_first_request_scales_up_from_zero() -> None:
    scaler = Autoscaler(replace(BOUNDS, least=0), 0)
    assert scaler.step(nobody(0), 0.0) == 0
    assert scaler.step(QueueLoad(0, busy=0, waiting=1), 5.0) == 1


# Down


def test_idle_replicas_are_removed_one_by_one() -> None:
    scaler = Autoscaler(BOUNDS, 3)
    replicas, changes = 3, {}
    for now in range(0, 2000, 10):
        before, replicas = replicas, scaler.step(nobody(replicas), float(now))
        if replicas != before:
            changes[now] = replicas
    assert changes == {300: 2, 610: 1}


@pytest.mark.parametrize("moment", [QueueLoad(2, busy=2), QueueLoad(2, busy=1, waiting=1)])
def test_one_busy_observation_keeps_replica(moment: QueueLoad) -> None:
    scaler = Autoscaler(BOUNDS, 2)
    for now in range(0, 3000, 100):
        assert scaler.step(nobody(2) if now % 200 else moment, float(now)) == 2


def test_loading_time_does_not_count_as_idle() -> None:
    scaler = Autoscaler(BOUNDS, 1)
    scaler.step(long_wait(1), 0.0)
    for now in range(10, 1000, 10):
        assert scaler.step(nobody(1), float(now)) == 2
    assert [scaler.step(nobody(2), now) for now in (1000.0, 1299.0, 1300.0)] == [2, 2, 1]


def test_replica_removed_too_soon_is_kept_longer_next_time() -> None:
    scaler = Autoscaler(BOUNDS, 2)
    kept, replicas, since = [], 2, 0.0
    for now in range(0, 12_000, 10):
        before = replicas
        load = nobody(replicas) if replicas == 2 else long_wait(replicas)
        replicas = scaler.step(load, float(now))
        if replicas < before:
            kept.append(now - since)
        elif replicas > before:
            since = now
    assert kept[0] == 300
    assert len(kept) == 5
    assert [round(after / before) for before, after in itertools.pairwise(kept)] == [2] * 4


# Refusals


def test_refused_replica_is_requested_again_with_backoff() -> None:
    scaler = Autoscaler(replace(BOUNDS, longest_backoff_s=480), 1)
    wanted = [1]
    for now in range(0, 2000, 5):
        wanted.append(scaler.step(long_wait(1, refused=wanted[-1] > 1), float(now)))
    asked = [5 * step for step, replicas in enumerate(wanted[1:]) if replicas > 1]
    pauses = [after - before for before, after in itertools.pairwise(asked)]
    # Five seconds until the answer, and at first the cooldown is longer than the pause.
    assert pauses == [65, 65, 125, 245, 485, 485, 485]


def test_granted_replica_resets_backoff() -> None:
    scaler = Autoscaler(BOUNDS, 1)
    now, asked = 0.0, scaler.step(long_wait(1), 0.0)
    for _ in range(5):
        scaler.step(long_wait(1, refused=True), now)
        now += 1000
        asked = scaler.step(long_wait(1), now)
    assert asked == 2
    assert scaler.state.refusals == 5
    assert scaler.step(long_wait(2), now + 60) == 3
    assert scaler.state.refusals == 0


def test_refusal_does_not_count_as_early_removal() -> None:
    scaler = Autoscaler(BOUNDS, 1)
    scaler.step(long_wait(1), 0.0)
    scaler.step(long_wait(1, refused=True), 1.0)
    assert scaler.step(long_wait(1), 100.0) == 2
    assert scaler.state.holds == 1


def test_refusal_can_keep_replicas_below_minimum() -> None:
    scaler = Autoscaler(replace(BOUNDS, least=2), 2)
    assert scaler.step(nobody(1), 0.0) == 2
    assert scaler.step(replace(nobody(1), refused=True), 1.0) == 1
    assert scaler.step(nobody(1), 30.0) == 1
    assert scaler.step(nobody(1), 31.0) == 2


def test_lost_replica_is_requested_again() -> None:
    scaler = Autoscaler(BOUNDS, 3)
    for now in range(5):
        assert scaler.step(QueueLoad(2, busy=2), float(now)) == 3


# Bounds


def test_changed_bounds_apply_immediately() -> None:
    scaler = Autoscaler(BOUNDS, 4)
    scaler.bounds = replace(BOUNDS, most=2)
    assert scaler.step(long_wait(4), 0.0) == 2
    scaler.bounds = replace(BOUNDS, least=3)
    assert scaler.step(nobody(2), 1.0) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": -1},
        {"least": 5},
        {"cooldown_s": 0},
        {"cooldown_s": 301},
        {"backoff_s": 0},
        {"backoff_s": 1e6},
    ],
)
def test_invalid_bounds_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        replace(BOUNDS, **wrong)  # type: ignore[arg-type]


def test_median_wait_is_zero_for_empty_queue() -> None:
    assert median_wait([], 5.0) == 0.0
    assert median_wait([1.0, 2.0, 4.5], 5.0) == 3.0


# Histories

_bounds = st.builds(
    lambda least, more, target_wait_s, cooldown_s, longer, backoff_s: Bounds(
        least, least + more, target_wait_s, cooldown_s + longer, cooldown_s, backoff_s, 960.0
    ),
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from([1.0, 30.0]),
    st.sampled_from([1.0, 20.0, 60.0]),
    st.sampled_from([0.0, 30.0, 600.0]),
    st.sampled_from([1.0, 30.0, 500.0]),
)
_moments = st.lists(
    st.tuples(
        st.floats(0, 100),  # seconds since the last
        st.integers(0, 9),  # busy
        st.integers(0, 3),  # waiting
        st.sampled_from([0.0, 10.0, 500.0]),  # waited
        st.sampled_from(["granted", "granted", "loading", "refused", "lost"]),
    ),
    max_size=80,
)


@settings(max_examples=examples(2))
@given(_bounds, st.integers(0, 9), _moments)
def test_bounds_backoff_and_cooldown_hold_for_any_history(
    bounds: Bounds, replicas: int, moments: list[tuple[float, int, int, float, str]]
) -> None:
    scaler = Autoscaler(bounds, replicas)
    now, wanted, refused = 0.0, replicas, False
    too_many, until = math.inf, -math.inf
    last: tuple[float, bool] | None = None
    for gap, busy, waiting, waited_s, answer in moments:
        now += gap
        before = wanted
        load = QueueLoad(replicas, min(busy, replicas), waiting, waited_s, refused)
        wanted = scaler.step(load, now)
        if refused:
            too_many, until = before, scaler.state.refused_until
            assert until >= now + bounds.backoff_s
        assert wanted <= bounds.most
        assert wanted >= bounds.least or now < until
        assert wanted < too_many or now >= until
        # Taking a refused step back is no turn, nor is coming within the bounds.
        if wanted != before and not refused and bounds.least <= before <= bounds.most:
            up = wanted > before
            if last is not None and last[1] != up:
                assert now - last[0] >= bounds.cooldown_s
            last = now, up
        refused = False
        if wanted < replicas:
            replicas = wanted
        elif wanted > replicas:
            refused = answer == "refused"
            replicas = wanted if answer == "granted" else replicas
        elif answer == "lost" and replicas:
            replicas -= 1


@given(_bounds, st.integers(0, 9), _moments)
def test_idle_autoscaler_settles_at_minimum(
    bounds: Bounds, replicas: int, moments: list[tuple[float, int, int, float, str]]
) -> None:
    scaler = Autoscaler(bounds, replicas)
    now = 0.0
    for gap, busy, waiting, waited_s, _ in moments:
        now += gap
        replicas = scaler.step(QueueLoad(replicas, min(busy, replicas), waiting, waited_s), now)
    counts = []
    for _ in range(9 * 16 + 9):
        now += bounds.idle_s
        replicas = scaler.step(nobody(replicas), now)
        counts.append(replicas)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == bounds.least


@settings(max_examples=examples(0.5))
@given(
    st.sampled_from([0.05, 0.5, 0.9, 1.0, 1.5, 2.2, 2.9, 4.0, 5.3, 7.5]),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([0.5, 5.0, 40.0]),
    st.sampled_from([0, 2, 12]),
)
def test_autoscaler_converges_under_constant_load(
    load: float, start: int, most: int, runs_s: float, loads_steps: int
) -> None:
    """`load` is the number of replicas that the arrivals keep busy; the queue grows by the excess."""
    every_s = 10.0
    bounds = replace(BOUNDS, most=most)
    scaler = Autoscaler(bounds, start)
    ready, loading, line, wanted = min(start, most), 0, 0.0, []
    for step in range(4_000):
        line = max(line + (load - ready) * every_s / runs_s, 0.0)
        waiting = math.ceil(line - 1e-9)
        queue_load = QueueLoad(
            ready,
            busy=ready if waiting else min(math.ceil(load), ready),
            waiting=waiting,
            waited_s=line * runs_s / max(ready, 1) / 2,
        )
        wanted.append(scaler.step(queue_load, step * every_s))
        if wanted[-1] > ready:
            loading += 1
            if loading > loads_steps:
                ready, loading = wanted[-1], 0
        else:
            ready, loading = wanted[-1], 0
    assert len(set(wanted[-1_000:])) == 1
    enough = min(math.ceil(load), most)
    assert wanted[-1] == enough


@pytest.mark.parametrize("load", [0.3, 1.5, 2.6])
@pytest.mark.parametrize("runs_s", [1.0, 40.0])
def test_random_fluctuation_of_load_rarely_changes_replicas(load: float, runs_s: float) -> None:
    """Two days of Poisson arrivals and exponential run times rarely change the number of replicas."""
    dice = random.Random(3)
    bounds = replace(BOUNDS, most=6, idle_s=600)
    scaler = Autoscaler(bounds, 1)
    free, changes = [0.0], []
    arriving, now, end = 0.0, 0.0, 2 * 86400 * runs_s / 40
    arrivals: list[float] = []
    while now < end:
        now += 10 * runs_s / 40
        while arriving < now:
            arrivals.append(arriving)
            arriving += dice.expovariate(load / runs_s)
        while arrivals and max(free[0], arrivals[0]) < now:
            start = max(heapq.heappop(free), arrivals.pop(0))
            heapq.heappush(free, start + dice.expovariate(1 / runs_s))
        queue_load = QueueLoad(
            len(free),
            busy=sum(end > now for end in free),
            waiting=len(arrivals),
            waited_s=median_wait(arrivals, now),
        )
        wanted = scaler.step(queue_load, now)
        if wanted != len(free):
            changes.append(now)
        while wanted > len(free):
            heapq.heappush(free, now)
        while wanted < len(free):
            free.remove(min(free))
            heapq.heapify(free)
    assert len(changes) <= 60
    assert sum(at > end / 2 for at in changes) <= 30


def test_step_is_pure_function() -> None:
    state = ScalingState(1)
    once = desired(state, long_wait(1), BOUNDS, 5.0)
    assert desired(state, long_wait(1), BOUNDS, 5.0) == once
    assert state == ScalingState(1)
