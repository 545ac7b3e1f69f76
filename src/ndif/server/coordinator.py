"""The coordinator: everything behind the broker. A server has one, in its only process or in its leader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ndif import __version__
from ndif.cluster.controller import OPERATOR_PREFIX, Controller
from ndif.cluster.controller_types import ReplicaRequest
from ndif.cluster.fleet import Fleet
from ndif.cluster.models import Models
from ndif.cluster.replica import Replica
from ndif.config.groups import TelemetrySettings
from ndif.config.settings import Settings
from ndif.control.control_plane import ControlPlane
from ndif.control.fetch_ahead import FetchAhead
from ndif.control.operations import Deploy, GetStatus
from ndif.control.overview import Overview
from ndif.control.probe_targets import watched
from ndif.control.reconciler import Reconciler
from ndif.control.state import current_problems, queue_waits
from ndif.host.evaluation import Evaluator, Measured
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtimes
from ndif.placement.demand import PlacementRules
from ndif.placement.replica import ReplicaKey
from ndif.probe.history import Histories
from ndif.probe.prober import Prober
from ndif.queue.autoscaler import Bounds, Scaling
from ndif.queue.callbacks.delivery import open_delivery
from ndif.queue.callbacks.guard import CallbackRules
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.processor import Processor, QueuePolicy
from ndif.schedule.expansion import LOCAL
from ndif.schedule.source import ScheduleSource
from ndif.schema.deployment import Defaults, DeploymentConfig, OperationError
from ndif.schema.deployment_settings import DeploymentChange
from ndif.schema.job_record import JobRecord
from ndif.schema.model_key import Variant
from ndif.schema.repositories import Repositories
from ndif.schema.request import Request
from ndif.schema.server_state import Problem, QueueWait, ServerState
from ndif.stores.accounts import PROBER
from ndif.stores.broker import Broker
from ndif.stores.events import EventLog
from ndif.stores.responder import Responder
from ndif.stores.stores import Stores
from ndif.stores.usage import MemoryUsage, open_usage
from ndif.tasks import end

if TYPE_CHECKING:
    from ndif.alerts.watch import Alerts
    from ndif.telemetry.traces import TraceExporter

logger = logging.getLogger(__name__)

_STOPPED = "The server was stopped before this job was done. Send it again once the server is back."

_PREPARE_AFTER_S = 3.0
"""Seconds after its start at which a server prepares for its first deployment."""


@dataclass(frozen=True)
class Oversight:
    """The operator's tools: the log of events, the alerts, and the end of the process."""

    events: EventLog
    alerts: Alerts | None = None
    """None if the server sends none."""
    stop: Callable[[], None] = lambda: None
    """End the process."""


class Coordinator:
    """The queues, the controller and the operator's operations of one server, put together.

    Owns the periodic tasks; starts the parts, and stops them in order. The caller provides the stores and
    the machines.
    """

    def __init__(
        self,
        settings: Settings,
        configs: Sequence[DeploymentConfig],
        stores: Stores[Broker],
        fleet: Fleet,
        runtimes: Runtimes,
        callbacks: CallbackRules,
        oversight: Oversight,
    ) -> None:
        """Put the parts together; `start` starts them, and loads the models of `configs`."""
        self._settings = settings
        self._configs = configs
        self._fleet = fleet
        self._runtimes = runtimes
        self._oversight = oversight
        self._tasks: list[asyncio.Task[None]] = []
        self._usage = open_usage(settings) if fleet.uses_placement else MemoryUsage()
        self._traces = _open_traces(settings)
        self._callbacks = open_delivery(settings, stores.callbacks, stores.objects, callbacks)
        self._evaluator = _evaluator(settings, fleet)
        self.histories = Histories()
        self.controller = self._make_controller()
        self.dispatcher = Dispatcher(
            self.controller, stores.broker, stores.responder, QueuePolicy.of(settings)
        )
        self.dispatcher.lifecycle.on_end = self._note_end
        self.reconciler = self._make_reconciler()
        fleet.protected = self.reconciler.kept_repositories
        self.control_plane = self._make_control_plane(stores.responder)

    def _make_controller(self) -> Controller:
        settings, fleet = self._settings, self._fleet
        repositories = Repositories.of(settings)
        controller = Controller(
            Models(self._configs, fixed=not fleet.uses_placement, repositories=repositories),
            fleet.make_actor,
            self._evaluate if fleet.uses_placement else _unmeasured,
            fleet.discover,
            rules=PlacementRules(
                minimum_deployment_time_s=settings.minimum_deployment_time_seconds,
                drain_s=settings.drain_timeout_s,
            ),
            uses_placement=fleet.uses_placement,
        )
        controller.on_leave(self._note_left)
        return controller

    def _make_reconciler(self) -> Reconciler:
        settings, uses_placement = self._settings, self._fleet.uses_placement
        is_scheduled = uses_placement and settings.schedule
        bounds = Bounds.of(settings) if uses_placement else Bounds()
        return Reconciler(
            self.controller,
            self.dispatcher,
            Scaling(self.dispatcher, bounds, on_change=self._note_scaled),
            ScheduleSource(settings.schedule, zone=LOCAL) if is_scheduled else None,
            self.generations,
            settings.controller_sync_interval_s,
            events=self._oversight.events,
            fetch_ahead=self._fetch_ahead() if is_scheduled else None,
        )

    def _make_control_plane(self, responder: Responder) -> ControlPlane:
        settings, oversight = self._settings, self._oversight
        overview = Overview(
            self.controller,
            self.dispatcher,
            self.reconciler,
            self._usage,
            self.histories,
            settings.minimum_deployment_time_seconds,
        )
        return ControlPlane(
            self.controller,
            self.dispatcher,
            self.reconciler,
            self.generations,
            oversight.stop,
            self._usage,
            responder,
            max(settings.response_ttl_s, settings.result_ttl_s),
            self._callbacks,
            overview,
            self.histories,
            oversight.alerts,
            oversight.events,
        )

    def generations(self) -> list[str]:
        """Return the installed nnsight generations, the newest first."""
        return sorted(self._runtimes.installed(), key=Version, reverse=True)

    async def start(
        self, waited: Sequence[Request] = (), url: str = "", probe_key: str = ""
    ) -> None:
        """Discover the machines, serve the queues, `waited` first, and deploy the configured models.

        Probes are sent to the server's address `url`; without a key there are none.
        """
        await self._usage.start()
        await self.controller.discover()
        self.dispatcher.adopt(await self._fleet.orphans())
        for request in waited:
            await self.dispatcher.accept(request)
        self.dispatcher.start()
        events, alerts = self._oversight.events, self._oversight.alerts
        events.record("started", "the server", f"Version {__version__}.", "server")
        self._start(events.run(), "events")
        self._start(self.reconciler.run(), "reconciler")
        self._start(self._callbacks.run(), "callbacks")
        if alerts is not None:
            self._start(alerts.run(self._observe, self._usage, events), "alerts")
        if self._fleet.uses_placement and self._configs:
            self._start(self._deploy(), "first deployments")
            self._start(self._prepare(), "fork servers")
        if self._settings.probe_interval_s and probe_key and url:
            prober = self._prober(self._settings.public_url or url, probe_key)
            self._start(prober.run(), "prober")

    def _start(self, task: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(task, name=name))

    async def fail_all(self) -> None:
        """End as an ERROR every request that the broker does not keep for the next process."""
        await self.dispatcher.fail_all(_STOPPED)

    async def stop(self) -> None:
        """Stop the queues, and the replicas unless these outlive their leader."""
        tasks, self._tasks = self._tasks, []
        await end(tasks)
        await self.control_plane.rollouts.stop()
        await self.fail_all()
        await self.dispatcher.stop()
        await self._usage.stop()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        await (self.controller.leave() if self._fleet.outlives else self.controller.stop())
        await self._evaluator.stop()
        self._callbacks.close()

    async def _observe(self) -> tuple[ServerState, list[Problem], list[QueueWait]]:
        """Return the state for the alerts, which measure the disk of results themselves."""
        server = await GetStatus().perform(self.control_plane)
        problems = [*current_problems(self.controller), *self.reconciler.problems()]
        return server, problems, queue_waits(self.dispatcher)

    def _prober(self, url: str, key: str) -> Prober:
        return Prober(
            lambda: [*watched(self.controller, self.reconciler)],
            self._runtimes.installed,
            url,
            key,
            self._settings.probe_interval_s,
            self._settings.probe_timeout_s,
            self.histories,
        )

    def _note_end(self, record: JobRecord) -> None:
        if record.user != PROBER:  # a probe is not a user's job
            self._usage.record(record)
        if self._traces is not None:
            self._traces.record(record)

    def _note_left(self, key: ReplicaKey, why: str) -> None:
        if self._tasks and not why.startswith(OPERATOR_PREFIX):  # recorded with the operation
            name = Variant.parse(key[0]).model.repo_id
            self._oversight.events.record(
                "left", name, f"A replica left its devices: {why}.", "server"
            )

    def _note_scaled(self, processor: Processor, replicas: int) -> None:
        previous = processor.desired_replicas
        text = f"{previous} → {replicas} replicas for nnsight {processor.variant.generation}."
        self._oversight.events.record("scaled", processor.variant.model.repo_id, text, "autoscaler")

    async def bring_up(self, generation: str) -> list[Replica]:
        """Request the replicas of every known model, and return the replicas that will load."""
        if not self.controller.cluster.nodes:
            await self.controller.discover()
        requests = [
            ReplicaRequest(model, generation, model.deployment.replicas)
            for model in self.controller.models
        ]
        if (
            sum(request.replicas for request in requests) > 1
            and generation in self._runtimes.installed()
        ):
            self._fleet.prepare(self._runtimes.installed()[generation])
        loading = []
        for request, result in zip(requests, await self.controller.deploy(requests), strict=True):
            self.dispatcher.processor(request.model, generation).adopt(result.replica_ids)
            replicas = (self.controller.replica(request.variant, i) for i in result.replica_ids)
            loading += [replica for replica in replicas if replica is not None]
        return loading

    async def _deploy(self) -> None:
        try:
            deployments = tuple(map(DeploymentChange.complete, self._configs))
            await Deploy(deployments=deployments).perform(self.control_plane)
        except OperationError as error:
            logger.error("%s", error)  # noqa: TRY400 - the sentence is the message
        except Exception:
            logger.exception("the configured models could not be deployed")

    async def _prepare(self) -> None:
        """Prepare the first installed runtime, so that the first deployment need not wait for imports."""
        # Not at once: the imports take two cores for some seconds, and clients reach a new server first.
        await asyncio.sleep(_PREPARE_AFTER_S)
        for runtime in [*self._runtimes.installed().values()][:1]:
            self._fleet.prepare(runtime)

    def _fetch_ahead(self) -> FetchAhead | None:
        if not self._settings.schedule_fetch_ahead_s:
            return None
        ahead = timedelta(seconds=self._settings.schedule_fetch_ahead_s)
        return FetchAhead(self.controller, self._fleet.fetch, ahead, self._oversight.events)

    async def _evaluate(self, config: DeploymentConfig, generation: str) -> Measured:
        runtime = self._runtimes.installed().get(generation)
        if runtime is None:
            raise ActorError(
                f"nnsight {generation} is not installed here; `ndif runtime add {generation}` adds it"
            )
        return await self._evaluator(config, runtime)


async def _unmeasured(config: DeploymentConfig, generation: str) -> Measured:
    """Return a nominal size: without placement no size is needed."""
    return Measured(1)


def _evaluator(settings: Settings, fleet: Fleet) -> Evaluator:
    return Evaluator(
        fleet.prepare,
        fleet.fork_servers,
        sandbox=settings.sandbox,
        pickled=bool(settings.allow_pickled_weights),
        defaults=Defaults.of(settings),
    )


def _open_traces(settings: TelemetrySettings) -> TraceExporter | None:
    """Return the exporter of jobs' spans; None, without an import, if the settings name none."""
    url = settings.otlp_url.get_secret_value()
    if not url:
        return None
    from ndif.telemetry.traces import TraceExporter

    return TraceExporter(url)
