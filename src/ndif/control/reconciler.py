"""Upkeep: what is looked after at regular times, whether or not anybody asks for anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

from ndif.cluster.asking import Asked
from ndif.cluster.controller import Controller
from ndif.cluster.models import Model
from ndif.cluster.schedule import Schedule
from ndif.cluster.schedule_source import ScheduleSource
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.scaling import Scaling
from ndif.schema.variant import Variant

logger = logging.getLogger(__name__)

_LONGEST_BACK_OFF = 32
"""How many times the interval a dedicated model that cannot be had is left alone, at most."""


class Upkeep:
    """Nodes that come and go, the schedule, dedicated models that are missing, replicas more or fewer."""

    def __init__(
        self,
        controller: Controller,
        dispatcher: Dispatcher,
        scaling: Scaling,
        source: ScheduleSource | None,
        generations: Callable[[], Sequence[str]],
        interval_s: float,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        """`interval_s`: between two looks at nodes and calendar; lines are looked at more often."""
        self._controller = controller
        self._dispatcher = dispatcher
        self._scaling = scaling
        self._source = source
        self._generations = generations
        self._interval_s = interval_s
        self._now = now
        self._schedule = Schedule()
        self._said: tuple[str, ...] = ()
        self._failures: dict[Variant, tuple[int, float]] = {}

    async def run(self) -> None:
        """Look after everything until cancelled."""
        await asyncio.gather(
            self._every(self._interval_s, self.sync),
            self._every(min(self._interval_s, 5.0), self._scaling.step),
            self._at_each_change(),
        )

    async def _every(self, interval_s: float, look: Callable[[], Any]) -> None:
        while True:
            await self._look(look)
            await asyncio.sleep(interval_s)

    async def _look(self, look: Callable[[], Any]) -> None:
        try:
            await look()
        except Exception:
            # What fails once must not end it for good.
            logger.exception("the server's upkeep failed; it goes on")

    async def _at_each_change(self) -> None:
        """Keep to the minute what the calendar says, however long the interval."""
        while True:
            change = self._schedule.next_change(self._now())
            left_s = self._interval_s
            if change is not None:
                left_s = min(left_s, max(0.0, (change - self._now()).total_seconds()))
            await asyncio.sleep(left_s + 0.01)
            if change is not None and self._now() >= change:
                await self._look(self.keep_schedule)

    async def sync(self) -> None:
        """One look at everything but the lines."""
        await self._controller.discover()
        if self._source is not None:
            # What users ask for is no word of the operator's.
            known = (model for model in self._controller.models if not model.on_demand)
            self._source.deployments = tuple(model.config for model in known)
            self._schedule = await self._source.refresh(self._now())
            if self._source.problems != self._said:
                self._said = self._source.problems
                for problem in self._said:
                    logger.warning("%s", problem)
        await self.keep_schedule()
        self._dispatcher.forget_idle()

    async def keep_schedule(self) -> None:
        """Have those models dedicated that are to be now, and there."""
        windows = self._schedule.dedicated_at(self._now())
        begun, ended = self._controller.models.book([window.config for window in windows])
        for model in ended:
            if model.on_demand:
                model.generations = frozenset()  # users have it in whichever they like
            self._controller.dedicate(model)
        for model in begun:
            self._failures = {v: f for v, f in self._failures.items() if v.model != model.key}
        await self._provide()

    async def _provide(self) -> None:
        """Have the dedicated models that are not there: nobody has to ask for them."""
        loop = asyncio.get_running_loop()
        asked = []
        for model in self._controller.models:
            if not model.dedicated or model.wanted.replicas < 1:
                continue
            runtimes = self._runtimes(model)
            # Where one is lost that was dedicated, another may stand in for it.
            self._controller.dedicate(model)
            for generation in runtimes:
                one = Asked(model, generation, model.wanted.replicas)
                _, not_before = self._failures.get(one.variant, (0, 0.0))
                if self._missing(one) and loop.time() >= not_before:
                    asked.append(one)
        if not asked:
            return
        for one, provided in zip(asked, await self._controller.deploy(asked), strict=True):
            processor = self._dispatcher.processor(one.model, one.generation)
            processor.least_replicas = processor.desired_replicas = one.replicas
            processor.adopt(provided.replica_ids)
            # Whether it comes up is not known yet: the next look is not to come too soon if it does not.
            failures, _ = self._failures.get(one.variant, (0, 0.0))
            wait_s = self._interval_s * min(2**failures, _LONGEST_BACK_OFF)
            self._failures[one.variant] = (failures + 1, loop.time() + wait_s)

    def _missing(self, asked: Asked) -> bool:
        variant = str(asked.variant)
        there = [h for h in self._controller.replicas() if h.deployment.model_key == variant]
        there = [hosted for hosted in there if hosted.deployment.dedicated]
        serving = sum(hosted.serving for hosted in there)
        if serving >= asked.replicas:
            self._failures.pop(asked.variant, None)
        return sum(hosted.serving or hosted.is_pending for hosted in there) < asked.replicas

    def _runtimes(self, model: Model) -> list[str]:
        """In which generations a dedicated model is to be there: its operator's, or the newest.

        Users of another have it loaded there on demand: one of their requests is to reserve nothing.
        """
        if model.booked is not None and model.booked.deployed_for:
            return [*model.booked.deployed_for]
        if not model.generations:
            model.generations = frozenset(model.wanted.deployed_for or self._generations()[:1])
        return sorted(model.generations)

    def booked_until(self, model: Model) -> datetime | None:
        """When what the calendar has a model dedicated for now ends, if it does have it."""
        for window in self._schedule.dedicated_at(self._now()):
            if self._controller.models.find(window.config.key) is model:
                return window.end
        return None

    def describe_schedule(self) -> dict[str, Any]:
        """It, for JSON."""
        now = self._now()
        change = self._schedule.next_change(now)
        windows = self._schedule.dedicated_at(now)
        return {
            "source": None if self._source is None else self._source.name,
            "problems": list(self._said),
            "next_change": change.isoformat() if change else None,
            "windows": [
                {
                    "model": window.config.repo_id,
                    "start": window.start.isoformat(),
                    "end": window.end.isoformat(),
                }
                for window in windows
            ],
        }
