"""The coordinator: everything behind the broker. There is one in a server, wherever it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from dateutil.tz import tzlocal
from packaging.version import Version

from ndif.cluster.asking import Asked, Measured
from ndif.cluster.controller import Controller
from ndif.cluster.fleet import Fleet
from ndif.cluster.hosted import Hosted
from ndif.cluster.models import Models
from ndif.cluster.rules import Rules
from ndif.cluster.schedule_source import ScheduleSource
from ndif.config import Settings
from ndif.host.evaluation import Evaluator
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtimes
from ndif.queue.autoscale import Bounds
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.operations import Operations
from ndif.queue.processor import Customs
from ndif.queue.responder import Responder
from ndif.queue.scaling import Scaling
from ndif.queue.upkeep import Upkeep
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.operation import OperationError
from ndif.schema.request import Request
from ndif.stores.broker import Broker
from ndif.tasks import end

logger = logging.getLogger(__name__)

_STOPPED = "The server was stopped before this job was done. Send it again once it is back."


class Coordinator:
    """Lines, decisions and replicas."""

    def __init__(
        self,
        settings: Settings,
        configs: Sequence[DeploymentConfig],
        broker: Broker,
        responder: Responder,
        fleet: Fleet,
        runtimes: Runtimes,
        *,
        places: bool,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`places`: whether models are measured and told where to go, or go where their options say."""
        self._configs = configs
        self._broker = broker
        self._places = places
        self._runtimes = runtimes
        self._fleet = fleet
        self._evaluator = Evaluator(measuring=fleet.expect)
        self._tasks: list[asyncio.Task[None]] = []
        self.controller = Controller(
            Models(configs),
            fleet.make_actor,
            self._evaluate if places else _unmeasured,
            fleet.discover,
            rules=Rules(minimum_deployment_time_s=settings.minimum_deployment_time_seconds),
            drain_s=settings.drain_timeout_s,
            places=places,
        )
        self.dispatcher = Dispatcher(self.controller, broker, responder, _customs(settings))
        bounds = _bounds(settings) if places else Bounds()
        self.upkeep = Upkeep(
            self.controller,
            self.dispatcher,
            Scaling(self.dispatcher, bounds),
            _schedule(settings) if places else None,
            self.generations,
            settings.controller_sync_interval_s,
        )
        self.operations = Operations(
            self.controller, self.dispatcher, self.upkeep, self.generations, stop
        )

    def generations(self) -> list[str]:
        """The nnsight generations that are installed, the newest first."""
        return sorted(self._runtimes.installed(), key=Version, reverse=True)

    async def start(self, waited: Sequence[Request] = ()) -> None:
        """Look at the machines, serve the lines, and have what the server was started with.

        `waited`: requests that were claimed before.
        """
        await self.controller.discover()
        self.dispatcher.adopt(await self._fleet.living())
        for request in waited:
            await self.dispatcher.put_in_line(request)
        self.dispatcher.start()
        self._tasks.append(asyncio.create_task(self.upkeep.run(), name="upkeep"))
        if self._places:
            self._tasks.append(asyncio.create_task(self._deploy(), name="first deployments"))

    async def dismiss(self) -> None:
        """End every request that nobody will bring to its end later."""
        if not self._broker.outlives:
            await self.dispatcher.dismiss(_STOPPED)

    async def stop(self) -> None:
        """End the lines, and what serves them unless it outlives them."""
        await end(self._tasks)
        await self.dismiss()
        await self.dispatcher.stop()
        if self._fleet.outlives:
            await self.controller.leave()
        else:
            await self.controller.stop()
        await self._evaluator.stop()

    async def bring_up(self, generation: str) -> list[Hosted]:
        """The replicas of every known model, on their way."""
        if not self.controller.cluster.nodes:
            await self.controller.discover()
        asked = [Asked(m, generation, m.wanted.replicas) for m in self.controller.models]
        coming = []
        for one, provided in zip(asked, await self.controller.deploy(asked), strict=True):
            self.dispatcher.processor(one.model, generation).adopt(provided.replica_ids)
            found = (self.controller.hosted(one.variant, i) for i in provided.replica_ids)
            coming += [hosted for hosted in found if hosted is not None]
        return coming

    async def _deploy(self) -> None:
        try:
            await self.operations.deploy(self._configs, None, wait=False, sync=False)
        except OperationError as error:
            logger.error("%s", error)  # noqa: TRY400 - the sentence is the message
        except Exception:
            logger.exception("what the server was started with could not be deployed")

    async def _evaluate(self, config: DeploymentConfig, generation: str) -> Measured:
        runtime = self._runtimes.installed().get(generation)
        if runtime is None:
            raise ActorError(
                f"nnsight {generation} is not installed here; `ndif runtime add {generation}` adds it"
            )
        found = await self._evaluator(config, runtime)
        return Measured(found.size_bytes, found.task, found.repo_id)


async def _unmeasured(config: DeploymentConfig, generation: str) -> Measured:
    """What shares its machine with nothing else that is placed."""
    return Measured(1)


def _customs(settings: Settings) -> Customs:
    return Customs(
        settings.processor_reply_freq_s,
        settings.max_attempts,
        settings.line_head_start_s,
        settings.line_patience,
    )


def _bounds(settings: Settings) -> Bounds:
    return Bounds(
        most=settings.autoscale_max_replicas,
        target_wait_s=settings.autoscale_target_wait_s,
        idle_s=settings.autoscale_idle_s,
        cooldown_s=settings.autoscale_cooldown_s,
        backoff_s=settings.autoscale_backoff_s,
        longest_backoff_s=settings.autoscale_longest_backoff_s,
    )


def _schedule(settings: Settings) -> ScheduleSource | None:
    return ScheduleSource(settings.schedule, zone=tzlocal()) if settings.schedule else None
