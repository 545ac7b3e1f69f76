"""The coordinator: everything behind the broker. A server has one, in whichever process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from packaging.version import Version

from ndif import __version__
from ndif.cluster.controller import OPERATORS, Controller
from ndif.cluster.controller_types import ReplicaRequest
from ndif.cluster.fleet import Fleet
from ndif.cluster.models import Models
from ndif.cluster.replica import Replica
from ndif.config.groups import SchedulingSettings, TelemetrySettings
from ndif.config.settings import Settings
from ndif.control.control_plane import ControlPlane
from ndif.control.fetch_ahead import FetchAhead
from ndif.control.operations import Deploy, GetStatus
from ndif.control.overview import Overview
from ndif.control.probing import watched
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
from ndif.queue.callbacks.delivery import CallbackDelivery
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
from ndif.stores.usage import UsageStore
from ndif.tasks import end

if TYPE_CHECKING:
    from ndif.alerts.watch import Alerts
    from ndif.telemetry.traces import TraceExporter

logger = logging.getLogger(__name__)

_STOPPED = "The server was stopped before this job was done. Send it again once it is back."

_PREPARE_AFTER_S = 3.0
"""Seconds after its start at which a server prepares for its first deployment."""


class Coordinator:
    """The queues, the controller and the operator's operations of one server, put together.

    Owns their start, their order of stopping and the periodic tasks. The broker, stores and machines come
    from its caller.
    """

    def __init__(
        self,
        settings: Settings,
        configs: Sequence[DeploymentConfig],
        broker: Broker,
        responder: Responder,
        fleet: Fleet,
        runtimes: Runtimes,
        callbacks: CallbackDelivery,
        *,
        usage: UsageStore,
        places: bool,
        alerts: Alerts | None = None,
        stop: Callable[[], None] = lambda: None,
        on_up: Callable[[Replica], None] = lambda _: None,
        probe_key: str = "",
        events: EventLog | None = None,
    ) -> None:
        """Put the parts together; `start` starts them.

        `places`: True to measure models and place them; False to load each where its options say.
        `probe_key` lets probes in; without one there are none.
        """
        self._settings = settings
        self._probe_key = probe_key
        self.histories = Histories()
        self._events = events or EventLog()
        self._configs = configs
        self._broker = broker
        self._places = places
        self._usage = usage
        self._alerts = alerts
        self._traces = _open_traces(settings)
        self._runtimes = runtimes
        self._fleet = fleet
        self._callbacks = callbacks
        self._evaluator = Evaluator(
            fleet.prepare,
            fleet.fork_servers,
            sandbox=settings.sandbox,
            pickled=bool(settings.allow_pickled_weights),
            defaults=Defaults.of(settings),
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.controller = Controller(
            Models(configs, fixed=not places, repositories=Repositories.of(settings)),
            fleet.make_actor,
            self._evaluate if places else _unmeasured,
            fleet.discover,
            rules=PlacementRules(
                minimum_deployment_time_s=settings.minimum_deployment_time_seconds
            ),
            drain_s=settings.drain_timeout_s,
            places=places,
            on_up=on_up,
        )
        policy = QueuePolicy(
            settings.processor_reply_freq_s,
            settings.max_attempts,
            settings.line_head_start_s,
            settings.line_patience,
        )
        self.dispatcher = Dispatcher(self.controller, broker, responder, policy)
        self.dispatcher.lifecycle.on_end = self._note_end
        self.controller.on_leave(self._note_left)
        is_scheduled = places and settings.schedule
        self.reconciler = Reconciler(
            self.controller,
            self.dispatcher,
            Scaling(
                self.dispatcher,
                _bounds(settings) if places else Bounds(),
                on_change=self._note_scaled,
            ),
            ScheduleSource(settings.schedule, zone=LOCAL) if is_scheduled else None,
            self.generations,
            settings.controller_sync_interval_s,
            events=self._events,
            fetch_ahead=self._fetch_ahead() if is_scheduled else None,
        )
        fleet.protected = self.reconciler.kept_repositories
        self.overview = Overview(
            self.controller,
            self.dispatcher,
            self.reconciler,
            usage,
            self.histories,
            settings.minimum_deployment_time_seconds,
        )
        self.control_plane = ControlPlane(
            self.controller,
            self.dispatcher,
            self.reconciler,
            self.generations,
            stop,
            usage,
            responder,
            max(settings.response_ttl_s, settings.result_ttl_s),
            callbacks,
            self.overview,
            self.histories,
            alerts,
            self._events,
        )

    def generations(self) -> list[str]:
        """Return the installed nnsight generations, the newest first."""
        return sorted(self._runtimes.installed(), key=Version, reverse=True)

    async def start(self, waited: Sequence[Request] = (), url: str = "") -> None:
        """Look at the machines, serve the queues, `waited` first, and deploy the configured models.

        Probes, if there are any, are sent to the server's address `url`.
        """
        await self._usage.start()
        await self.controller.discover()
        self.dispatcher.adopt(await self._fleet.orphans())
        for request in waited:
            await self.dispatcher.accept(request)
        self.dispatcher.start()
        self._events.note("started", "the server", f"Version {__version__}.", "server")
        self._tasks.append(asyncio.create_task(self._events.run(), name="events"))
        self._tasks.append(asyncio.create_task(self.reconciler.run(), name="reconciler"))
        self._tasks.append(asyncio.create_task(self._callbacks.run(), name="call-backs"))
        if self._alerts is not None:
            watching = self._alerts.run(self._look, self._usage, self._events)
            self._tasks.append(asyncio.create_task(watching, name="alerts"))
        if self._places and self._configs:
            self._tasks.append(asyncio.create_task(self._deploy(), name="first deployments"))
            self._tasks.append(asyncio.create_task(self._prepare(), name="fork servers"))
        if self._settings.probe_interval_s and self._probe_key and url:
            prober = self._prober(self._settings.public_url or url)
            self._tasks.append(asyncio.create_task(prober.run(), name="prober"))

    async def fail_all(self) -> None:
        """End every request as an ERROR that the broker does not keep for the process after this one."""
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

    async def _look(self) -> tuple[ServerState, list[Problem], list[QueueWait]]:
        """Return the state that alerts follow from; they measure the disk of results themselves."""
        server = await GetStatus().perform(self.control_plane)
        found = [*current_problems(self.controller), *self.reconciler.problems()]
        return server, found, queue_waits(self.dispatcher)

    def _prober(self, url: str) -> Prober:
        return Prober(
            lambda: [*watched(self.controller, self.reconciler)],
            self._runtimes.installed,
            url,
            self._probe_key,
            self._settings.probe_interval_s,
            self._settings.probe_timeout_s,
            self.histories,
        )

    def _note_end(self, record: JobRecord) -> None:
        if record.user != PROBER:  # a probe is no job of a user's
            self._usage.note(record)
        if self._traces is not None:
            self._traces.note(record)

    def _note_left(self, key: ReplicaKey, why: str) -> None:
        if self._tasks and not why.startswith(OPERATORS):  # whose event is noted with the operation
            name = Variant.parse(key[0]).model.repo_id
            self._events.note("left", name, f"A replica left its devices: {why}.", "server")

    def _note_scaled(self, processor: Processor, replicas: int) -> None:
        was = processor.desired_replicas
        text = f"{was} → {replicas} replicas for nnsight {processor.variant.generation}."
        self._events.note("scaled", processor.variant.model.repo_id, text, "autoscaler")

    async def bring_up(self, generation: str) -> list[Replica]:
        """Request the replicas of every known model, and return those that come."""
        if not self.controller.cluster.nodes:
            await self.controller.discover()
        asked = [
            ReplicaRequest(m, generation, m.deployment.replicas) for m in self.controller.models
        ]
        if sum(each.replicas for each in asked) > 1 and generation in self._runtimes.installed():
            self._fleet.prepare(self._runtimes.installed()[generation])
        coming = []
        for one, provided in zip(asked, await self.controller.deploy(asked), strict=True):
            self.dispatcher.processor(one.model, generation).adopt(provided.replica_ids)
            found = (self.controller.replica(one.variant, i) for i in provided.replica_ids)
            coming += [replica for replica in found if replica is not None]
        return coming

    async def _deploy(self) -> None:
        try:
            deployments = tuple(map(DeploymentChange.complete, self._configs))
            await Deploy(deployments=deployments).perform(self.control_plane)
        except OperationError as error:
            logger.error("%s", error)  # noqa: TRY400 - the sentence is the message
        except Exception:
            logger.exception("what the server was started with could not be deployed")

    async def _prepare(self) -> None:
        """Import what models of the newest generation need, so that the first deployment need not wait."""
        # The imports take two cores for some seconds, which is when clients first reach a new server.
        await asyncio.sleep(_PREPARE_AFTER_S)
        for runtime in [*self._runtimes.installed().values()][:1]:
            self._fleet.prepare(runtime)

    def _fetch_ahead(self) -> FetchAhead | None:
        if not self._settings.schedule_fetch_ahead_s:
            return None
        ahead = timedelta(seconds=self._settings.schedule_fetch_ahead_s)
        return FetchAhead(self.controller, self._fleet.fetch, ahead, self._events)

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


def _open_traces(settings: TelemetrySettings) -> TraceExporter | None:
    """Return what sends the spans of jobs; None if nothing does, and nothing is imported for it."""
    url = settings.otlp_url.get_secret_value()
    if not url:
        return None
    from ndif.telemetry.traces import TraceExporter

    return TraceExporter(url)


def _bounds(settings: SchedulingSettings) -> Bounds:
    return Bounds(
        most=settings.autoscale_max_replicas,
        target_wait_s=settings.autoscale_target_wait_s,
        idle_s=settings.autoscale_idle_s,
        cooldown_s=settings.autoscale_cooldown_s,
        backoff_s=settings.autoscale_backoff_s,
        longest_backoff_s=settings.autoscale_longest_backoff_s,
    )
