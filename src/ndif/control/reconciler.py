"""The reconciler: brings dedicated models and numbers of replicas to their desired state."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Literal

from ndif.cluster.controller import Controller
from ndif.cluster.controller_types import ReplicaRequest
from ndif.cluster.models import Model
from ndif.control.fetch_ahead import FetchAhead
from ndif.queue.autoscaler import Scaling
from ndif.queue.dispatcher import Dispatcher
from ndif.schedule.schedule import Schedule, Window
from ndif.schedule.source import ScheduleSource
from ndif.schema.model_key import Variant
from ndif.schema.server_state import BookedWindow, Problem, ProblemKind, ScheduleState
from ndif.stores.events import EventLog

logger = logging.getLogger(__name__)

Kept = Literal["deployed", "booked"]
"""Reason why a repository stays in each node's cache of the Hub."""

_MAX_BACK_OFF = 32
"""Maximum wait before a failing dedicated model is deployed again, in intervals."""
_SCALING_INTERVAL_S = 5.0
_NUMBER = re.compile(r"\d[\d.,:]*")
_MAX_SUBJECT = 500
_SHOWN_AHEAD = timedelta(days=7)
"""How far ahead clients see the calendar."""


@dataclass(eq=False)
class Reconciler:
    """Compares the actual state with the desired state at intervals, and requests the difference.

    It discovers nodes, books the models of the calendar, deploys dedicated models that lack replicas, and
    runs the autoscaler. The controller places the replicas.
    """

    controller: Controller
    dispatcher: Dispatcher
    scaling: Scaling
    source: ScheduleSource | None
    """The calendar's source; None if the server follows no calendar."""
    generations: Callable[[], Sequence[str]]
    """Returns the installed nnsight generations, the newest first."""
    interval_s: float
    """Seconds between two checks of nodes and calendar; the autoscaler runs at least every 5 s."""
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    events: EventLog = field(default_factory=EventLog)
    fetch_ahead: FetchAhead | None = None
    """Downloads models ahead of their bookings; None if models are downloaded when a booking begins."""
    _schedule: Schedule = field(default_factory=Schedule, init=False)
    _problems: tuple[str, ...] = field(default=(), init=False)
    _failures: dict[Variant, tuple[int, float]] = field(default_factory=dict, init=False)
    """By variant: the number of consecutive failures, and the loop time of the next attempt."""

    async def run(self) -> None:
        """Reconcile until cancelled."""
        try:
            await asyncio.gather(
                self._repeat(self.interval_s, self.sync),
                self._repeat(min(self.interval_s, _SCALING_INTERVAL_S), self.scaling.step),
                self._follow_schedule(),
            )
        finally:
            if self.fetch_ahead is not None:
                await self.fetch_ahead.stop()

    async def _repeat(self, interval_s: float, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._run_step(step)
            await asyncio.sleep(interval_s)

    async def _run_step(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except Exception:
            # One failure must not end the loop.
            logger.exception("the reconciler failed at %s and continues", step.__name__)

    async def _follow_schedule(self) -> None:
        """Apply each change of the calendar on time, regardless of the interval."""
        while True:
            change = self._schedule.next_change(self.now())
            left_s = self.interval_s
            if change is not None:
                left_s = min(left_s, max(0.0, (change - self.now()).total_seconds()))
            await asyncio.sleep(left_s + 0.01)
            if change is not None and self.now() >= change:
                await self._run_step(self.apply_schedule)

    async def sync(self) -> None:
        """Discover nodes, read the calendar and deploy the dedicated models that lack replicas."""
        await self.controller.discover()
        if self.source is not None:
            # Bookings refer to the operator's models, not to models that users requested.
            models = (model for model in self.controller.models if not model.on_demand)
            self.source.deployments = tuple(model.config for model in models)
            self._schedule = await self.source.refresh(self.now())
            if self.source.problems != self._problems:
                self._problems = self.source.problems
                for problem in self._problems:
                    logger.warning("%s", problem)
        await self.apply_schedule()
        self._fetch_coming()
        self.dispatcher.forget_idle()

    async def apply_schedule(self) -> None:
        """Book the models that the calendar dedicates now, and deploy missing replicas."""
        windows = self._schedule.dedicated_at(self.now())
        begun, ended = self.controller.models.schedule([window.config for window in windows])
        for model in begun:
            self.events.record("booking begun", model.config.repo_id, "", "calendar")
        for model in ended:
            self.events.record("booking over", model.config.repo_id, "", "calendar")
            if model.on_demand:
                model.generations = frozenset()  # users may request any generation
            self.controller.dedicate(model)
        for model in begun:
            self._failures = {v: f for v, f in self._failures.items() if v.model != model.key}
        await self._deploy_missing()

    def _fetch_coming(self) -> None:
        if self.fetch_ahead is not None and self.generations():
            now = self.now()
            windows = self._schedule.windows(now, now + self.fetch_ahead.ahead)
            self.fetch_ahead.update(windows, self._first_generation)

    def _first_generation(self, window: Window) -> str:
        """Return a generation that a booked model will be loaded for; all load the same files."""
        model = self.controller.models.find(window.config.key)
        named: Iterable[str] = window.config.deployed_for or sorted(
            model.generations if model else ()
        )
        return next(iter((*named, *self.generations())))

    async def _deploy_missing(self) -> None:
        """Deploy the dedicated models that lack replicas, before any request asks for them."""
        loop = asyncio.get_running_loop()
        requests = []
        for model in self.controller.models:
            if not model.dedicated or model.deployment.replicas < 1:
                continue
            generations = self.generations_of(model)
            # After the loss of a dedicated replica, another replica may become dedicated instead.
            self.controller.dedicate(model)
            for generation in generations:
                request = ReplicaRequest(model, generation, model.deployment.replicas)
                _, not_before = self._failures.get(request.variant, (0, 0.0))
                if self._is_missing(request) and loop.time() >= not_before:
                    requests.append(request)
        if not requests:
            return
        for request, provided in zip(requests, await self.controller.deploy(requests), strict=True):
            processor = self.dispatcher.processor(request.model, request.generation)
            processor.least_replicas = processor.desired_replicas = request.replicas
            processor.adopt(provided.replica_ids)
            # The replicas may still fail to load, so the next attempt always waits.
            failures, _ = self._failures.get(request.variant, (0, 0.0))
            wait_s = self.interval_s * min(2**failures, _MAX_BACK_OFF)
            self._failures[request.variant] = (failures + 1, loop.time() + wait_s)

    def _is_missing(self, request: ReplicaRequest) -> bool:
        variant = str(request.variant)
        dedicated = [
            replica
            for replica in self.controller.replicas()
            if replica.placed.model_key == variant and replica.placed.dedicated
        ]
        serving = sum(replica.serving for replica in dedicated)
        if serving >= request.replicas:
            self._failures.pop(request.variant, None)
        return (
            sum(replica.serving or replica.is_pending for replica in dedicated) < request.replicas
        )

    def generations_of(self, model: Model) -> list[str]:
        """Return the generations of a dedicated model: the operator's choice, or the newest generation.

        For other generations, the model is loaded on demand and is not dedicated.
        """
        if model.scheduled is not None and model.scheduled.deployed_for:
            return [*model.scheduled.deployed_for]
        if not model.generations:
            model.generations = frozenset(model.deployment.deployed_for or self.generations()[:1])
        return sorted(model.generations)

    def coming(self) -> tuple[Window, ...]:
        """Return the calendar's windows of the next days, which clients see."""
        now = self.now()
        return self._schedule.windows(now, now + _SHOWN_AHEAD)

    def kept_repositories(self) -> dict[str, Kept]:
        """Return the repositories that no node may delete from its cache, with the reason for each."""
        now, end = self.now(), datetime.max.replace(tzinfo=timezone.utc)
        kept: dict[str, Kept] = {}
        for window in self._schedule.windows(now, end):
            kept |= dict.fromkeys((window.config.repo_id, window.config.checkpoint), "booked")
        loaded = {id(replica.model) for replica in self.controller.replicas()}
        for model in self.controller.models:
            if model.dedicated or model.deploying or id(model) in loaded:
                kept |= dict.fromkeys(
                    (model.config.repo_id, model.deployment.checkpoint), "deployed"
                )
        return kept

    def scheduled_until(self, model: Model) -> datetime | None:
        """Return the end of the model's current booking; None without a booking."""
        for window in self._schedule.dedicated_at(self.now()):
            if self.controller.models.find(window.config.key) is model:
                return window.end
        return None

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the calendar."""
        for text in self._problems:
            # Mask numbers: the times in the text change daily, but the subject must stay the same.
            yield Problem(ProblemKind.PROBLEM, _NUMBER.sub("#", text)[:_MAX_SUBJECT], text)

    def schedule_state(self) -> ScheduleState:
        """Return the calendar's source, problems, next change and coming windows."""
        change = self._schedule.next_change(self.now())
        return ScheduleState(
            source=None if self.source is None else self.source.name,
            problems=list(self._problems),
            next_change=change.isoformat() if change else None,
            read_every_s=self.interval_s,
            windows=[
                BookedWindow(
                    model=window.config.repo_id,
                    start=window.start.isoformat(),
                    end=window.end.isoformat(),
                )
                for window in self.coming()
            ],
        )
