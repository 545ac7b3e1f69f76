"""Autoscaler: how many replicas a model should have. A step is a pure function of what is seen.

One replica more when those in line wait too long; one less when for a good while one was not needed. Each
change is given `cooldown_s` to show what it does before the next, so that none answers a state of affairs
which the last one has yet to change. What the cluster refused is not asked again before a pause that
doubles with each refusal. Where a replica is taken away and soon missed, the next is kept longer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

_LONGEST_HOLD = 16
"""How many times `idle_s` an unneeded replica is kept, at most."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an operator allows, and how eagerly replicas come and go."""

    least: int = 1
    most: int = 1
    target_wait_s: float = 30.0
    """Those in line may wait this long, by the median, before another replica is asked for."""
    idle_s: float = 600.0
    """A replica that was not needed this long is let go."""
    cooldown_s: float = 60.0
    """Between two changes."""
    backoff_s: float = 30.0
    """After the first refusal; each further one doubles it."""
    longest_backoff_s: float = 960.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"bounds must be 0 ≤ least ≤ most, not {self.least} and {self.most}")
        if not 0 < self.cooldown_s <= self.idle_s:
            raise ValueError("cooldown_s must be more than 0 and no more than idle_s")
        if not 0 < self.backoff_s <= self.longest_backoff_s:
            raise ValueError("backoff_s must be more than 0 and no more than longest_backoff_s")


@dataclass(frozen=True, slots=True)
class Observation:
    """A model's line and replicas, as they are now."""

    replicas: int
    """Those that are ready."""
    busy: int
    """The most that ran at once since the last observation."""
    waiting: int = 0
    """The most that waited at once since the last observation."""
    waited_s: float = 0.0
    """`median_wait` of the line."""
    refused: bool = False
    """Whether the cluster has refused, since the last step, what that step asked for."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What a step has to know of those before it."""

    wanted: int
    direction: int = 0
    """Of the last change: 1 is up, -1 is down; 0 before any, and after one that was refused."""
    changed_at: float = -math.inf
    spare_since: float | None = None
    """Since when one replica less would have done; None while all are needed."""
    holds: int = 1
    """How many times `idle_s` an unneeded replica is kept."""
    refusals: int = 0
    """In a row."""
    refused_until: float = -math.inf


def desired(
    state: ScalingState, observation: Observation, bounds: Bounds, now: float
) -> tuple[ScalingState, int]:
    """The next state, and how many replicas there should be: more than there are is asking for them.

    Never more than `most`; less than `least` only while a refusal stands, when it is what there is.
    """
    state = _heed_the_answer(state, observation, bounds, now)
    pausing = now < state.refused_until
    least = min(bounds.least, state.wanted) if pausing else bounds.least
    within = min(max(state.wanted, least), bounds.most)
    if within != state.wanted:
        state = _change(state, within, now)
    # A replica that is still loading, or was lost, must not count as one that was not enough.
    settled = observation.replicas >= state.wanted
    spare = settled and observation.waiting == 0 and observation.busy < state.wanted
    if not spare:
        state = replace(state, spare_since=None)
    elif state.spare_since is None:
        state = replace(state, spare_since=now)
    if now - state.changed_at < bounds.cooldown_s:
        return state, state.wanted
    missed = observation.waiting > 0 and (
        observation.waited_s > bounds.target_wait_s or state.wanted == 0
    )
    if missed and settled and not pausing and state.wanted < bounds.most:
        # The one that was let go last is missed: keep the next one longer.
        holds = min(state.holds * 2, _LONGEST_HOLD) if state.direction < 0 else state.holds
        state = replace(_change(state, state.wanted + 1, now), holds=holds)
    elif (
        state.spare_since is not None
        and now - state.spare_since >= bounds.idle_s * state.holds
        and state.wanted > bounds.least
    ):
        # Two in a row go unmissed: no reason to keep any longer than asked.
        holds = 1 if state.direction < 0 else state.holds
        state = replace(_change(state, state.wanted - 1, now), holds=holds)
    return state, state.wanted


class Autoscaler:
    """The scaling of one model: its bounds, and the state between two steps."""

    def __init__(self, bounds: Bounds, replicas: int) -> None:
        self.bounds = bounds
        """May be replaced at any time; the next step holds to it."""
        self.state = ScalingState(replicas)

    def step(self, observation: Observation, now: float) -> int:
        """How many replicas there should be."""
        self.state, replicas = desired(self.state, observation, self.bounds, now)
        return replicas


def median_wait(arrivals: Iterable[float], now: float) -> float:
    """Seconds that those who arrived then have waited, the median; 0 for nobody."""
    return statistics.median([now - arrived for arrived in arrivals] or [0.0])


def _heed_the_answer(
    state: ScalingState, observation: Observation, bounds: Bounds, now: float
) -> ScalingState:
    """Learn whether what was asked for last has come, or was refused."""
    if observation.replicas >= state.wanted:
        return replace(state, refusals=0) if state.direction > 0 else state
    if not observation.refused:
        return state
    # Doubling a number without end would overflow long after it has stopped to matter.
    pause = min(bounds.backoff_s * 2.0 ** min(state.refusals, 64), bounds.longest_backoff_s)
    return replace(
        _change(state, min(observation.replicas, bounds.most), now),
        direction=0,
        refusals=state.refusals + 1,
        refused_until=now + pause,
    )


def _change(state: ScalingState, wanted: int, now: float) -> ScalingState:
    direction = 1 if wanted > state.wanted else -1
    return replace(state, wanted=wanted, direction=direction, changed_at=now, spare_since=None)
