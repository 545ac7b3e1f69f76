"""The number of replicas of a model, as a pure function of its load, and the loop that applies it.

A replica is added when requests wait too long, and removed when it was not needed for `idle_s`. Changes are
`cooldown_s` apart, so that the effect of one is visible before the next. A replica that the cluster refused
is requested again after a pause that doubles with each refusal. If a removed replica is soon missed, the
next one is kept longer.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ndif.config.groups import SchedulingSettings
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor
from ndif.schema.model_key import Variant

_LONGEST_HOLD = 16
"""Maximum multiple of `idle_s` for which an unneeded replica is kept."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds and pace of one model's scaling."""

    least: int = 1
    most: int = 1
    target_wait_s: float = 30.0
    """Median wait, in seconds, beyond which another replica is requested."""
    idle_s: float = 600.0
    """Seconds after which a replica that was not needed is removed."""
    cooldown_s: float = 60.0
    """Seconds between two changes."""
    backoff_s: float = 30.0
    """Seconds of pause after the first refusal; each further one doubles the pause."""
    longest_backoff_s: float = 960.0

    @classmethod
    def of(cls, settings: SchedulingSettings) -> Bounds:
        """Return the bounds that the settings describe."""
        return cls(
            most=settings.autoscale_max_replicas,
            target_wait_s=settings.autoscale_target_wait_s,
            idle_s=settings.autoscale_idle_s,
            cooldown_s=settings.autoscale_cooldown_s,
            backoff_s=settings.autoscale_backoff_s,
            longest_backoff_s=settings.autoscale_longest_backoff_s,
        )

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"bounds must be 0 ≤ least ≤ most, not {self.least} and {self.most}")
        if not 0 < self.cooldown_s <= self.idle_s:
            raise ValueError("cooldown_s must be more than 0 and no more than idle_s")
        if not 0 < self.backoff_s <= self.longest_backoff_s:
            raise ValueError("backoff_s must be more than 0 and no more than longest_backoff_s")


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The load of a model's queue and replicas now."""

    replicas: int
    """Replicas that are ready."""
    busy: int
    """Maximum that ran at once since the last observation."""
    waiting: int = 0
    """Maximum that waited at once since the last observation."""
    waited_s: float = 0.0
    """`median_wait` of the queue."""
    refused: bool = False
    """True if the cluster has refused the replicas that the last step requested."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """State between two steps."""

    wanted: int
    direction: int = 0
    """Direction of the last change: 1 is up, -1 is down; 0 before any, and after a refused one."""
    changed_at: float = -math.inf
    spare_since: float | None = None
    """Time since which one replica fewer would have sufficed; None while all are needed."""
    holds: int = 1
    """Multiple of `idle_s` for which an unneeded replica is kept."""
    refusals: int = 0
    """Number of consecutive refusals."""
    refused_until: float = -math.inf


def desired(
    state: ScalingState, observation: QueueLoad, bounds: Bounds, now: float
) -> tuple[ScalingState, int]:
    """Return the next state, and how many replicas there should be.

    The number never exceeds `most`, and is less than `least` only while a refusal stands.
    """
    state = _after_answer(state, observation, bounds, now)
    pausing = now < state.refused_until
    least = min(bounds.least, state.wanted) if pausing else bounds.least
    bounded = min(max(state.wanted, least), bounds.most)
    if bounded != state.wanted:
        state = _change(state, bounded, now)
    # While a replica loads, or after it was lost, a long wait does not show that replicas are too few.
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
        # The replica that was removed last is missed: keep the next one longer.
        holds = min(state.holds * 2, _LONGEST_HOLD) if state.direction < 0 else state.holds
        state = replace(_change(state, state.wanted + 1, now), holds=holds)
    elif (
        state.spare_since is not None
        and now - state.spare_since >= bounds.idle_s * state.holds
        and state.wanted > bounds.least
    ):
        # Two consecutive removals were not missed: keep no replica longer than configured.
        holds = 1 if state.direction < 0 else state.holds
        state = replace(_change(state, state.wanted - 1, now), holds=holds)
    return state, state.wanted


class Autoscaler:
    """The scaling of one model: its bounds, and the state between two steps."""

    def __init__(self, bounds: Bounds, replicas: int) -> None:
        self.bounds = bounds
        """Bounds of the next step; replaceable at any time."""
        self.state = ScalingState(replicas)

    def step(self, observation: QueueLoad, now: float) -> int:
        """Return how many replicas there should be."""
        self.state, replicas = desired(self.state, observation, self.bounds, now)
        return replicas


def median_wait(arrivals: Iterable[float], now: float) -> float:
    """Return the median of the seconds waited since these arrivals; 0 without any."""
    return statistics.median([now - arrived for arrived in arrivals] or [0.0])


def _after_answer(
    state: ScalingState, observation: QueueLoad, bounds: Bounds, now: float
) -> ScalingState:
    """Return the state once the replicas requested last have come, or were refused."""
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


@dataclass(eq=False)
class Scaling:
    """One `Autoscaler` per processor, and the execution of its results.

    Reads each processor's load and makes it add or remove replicas. The controller places them.
    """

    dispatcher: Dispatcher
    bounds: Bounds
    """Bounds of every model whose operator set none."""
    now: Callable[[], float] = time.time
    on_change: Callable[[Processor, int], None] = lambda _, __: None
    """Called with a processor and the number of replicas that it will have."""
    _scalers: dict[Variant, Autoscaler] = field(default_factory=dict, init=False)

    async def step(self) -> None:
        """Scale every processor once."""
        processors = self.dispatcher.processors
        for removed in self._scalers.keys() - processors.keys():
            del self._scalers[removed]
        for variant, processor in list(processors.items()):
            self._step(self._scaler(variant, processor), processor)

    def _scaler(self, variant: Variant, processor: Processor) -> Autoscaler:
        least = processor.least_replicas
        most = max(processor.model.deployment.max_replicas or self.bounds.most, least)
        scaler = self._scalers.get(variant)
        if scaler is None or (scaler.bounds.least, scaler.bounds.most) != (least, most):
            # The processor is new, or its operator changed its bounds: earlier state is void.
            bounds = replace(self.bounds, least=least, most=most)
            scaler = self._scalers[variant] = Autoscaler(bounds, least)
        return scaler

    def _step(self, scaler: Autoscaler, processor: Processor) -> None:
        load = processor.take_load_sample()
        at_rest = processor.desired_replicas == processor.least_replicas == scaler.state.wanted
        if at_rest and not load.waiting and not processor.queue:
            return  # nothing to do: the state of most processors at most times
        observation = QueueLoad(
            replicas=processor.replicas.serving,
            busy=load.running,
            waiting=load.waiting,
            waited_s=median_wait((job.arrived for job in processor.queue), self.now()),
            refused=load.refused,
        )
        wanted = scaler.step(observation, asyncio.get_running_loop().time())
        if wanted > processor.desired_replicas and processor.replicas.staying:
            self.on_change(processor, wanted)
            processor.add_replicas(wanted)
        elif wanted < processor.desired_replicas:
            if load.refused:
                processor.desired_replicas = wanted  # replicas that are still on their way may come
            else:
                self.on_change(processor, wanted)
                processor.scale(wanted)
