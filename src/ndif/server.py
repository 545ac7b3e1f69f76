"""The control plane of one process: every house in its embedded form, put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import uvicorn
from dateutil.tz import tzlocal
from packaging.version import Version
from starlette.applications import Starlette

from ndif.cluster.asking import Asked, Measured
from ndif.cluster.controller import Controller
from ndif.cluster.deployment import Deployment
from ndif.cluster.hosted import Hosted
from ndif.cluster.models import Models
from ndif.cluster.node import Node
from ndif.cluster.resources import Resources, parse_gpus
from ndif.cluster.rules import Rules
from ndif.cluster.schedule_source import ScheduleSource
from ndif.cluster.status import for_clients
from ndif.config import Settings
from ndif.gateway.admin import Admin
from ndif.gateway.app import gateway
from ndif.gateway.health import Health
from ndif.gateway.hub import Hub, HubModel
from ndif.gateway.responses import Responses
from ndif.gateway.results import Results
from ndif.gateway.socket_io import SocketIo
from ndif.gateway.submit import Submit
from ndif.gateway.subscribe import Subscribe
from ndif.host import machine
from ndif.host.actor import ModelActor
from ndif.host.evaluation import Evaluator
from ndif.host.port import ActorError
from ndif.host.runtimes import Runtimes
from ndif.host.weights import Weights
from ndif.queue.autoscale import Bounds
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.operations import Operations
from ndif.queue.processor import Customs
from ndif.queue.responder import Responder
from ndif.queue.scaling import Scaling
from ndif.queue.upkeep import Upkeep
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.operation import OperationError
from ndif.schema.quantities import size
from ndif.stores.accounts import Accounts, FileAccounts, OpenAccounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore, open_store

logger = logging.getLogger(__name__)

_GRACE_S = 3
"""Seconds that open connections have to end when the server does."""


class Server:
    """Models, served to every installed nnsight generation."""

    def __init__(
        self,
        settings: Settings,
        configs: Sequence[DeploymentConfig],
        results: Path,
        *,
        loopback: bool,
        accounts: Accounts,
        trusted: bool,
        places: bool,
        share_weights: bool = False,
        runtimes: Runtimes | None = None,
        token: str | None = None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """`places`: whether models are measured and told where to go, or go where their options say."""
        self._settings = settings
        self._configs = configs
        self._trusted = trusted
        self._places = places
        self._node: Node | None = None
        self._has_gpus = False
        self._objects = open_store(settings, results)
        self._broker = MemoryBroker()
        self._runtimes = runtimes or Runtimes(settings.runtimes)
        self._weights = Weights()
        self._evaluator = Evaluator()
        self._hub = Hub(share_weights=share_weights)
        responder = Responder(self._broker, self._objects)
        self.controller = Controller(
            Models(configs),
            self._actor,
            self._evaluate if places else _unmeasured,
            self._discover,
            rules=Rules(minimum_deployment_time_s=settings.minimum_deployment_time_seconds),
            drain_s=settings.drain_timeout_s,
        )
        self.controller.on_up = self._share
        self.dispatcher = Dispatcher(self.controller, self._broker, responder, _customs(settings))
        bounds = _bounds(settings) if places else Bounds()
        self._upkeep = Upkeep(
            self.controller,
            self.dispatcher,
            Scaling(self.dispatcher, bounds),
            _schedule(settings) if places else None,
            self.generations,
            settings.controller_sync_interval_s,
        )
        self.operations = Operations(
            self.controller, self.dispatcher, self._upkeep, self.generations, stop
        )
        models = self.controller.models
        submit = Submit(settings, self._broker, responder, self._runtimes, models, accounts)
        health = Health(
            lambda: for_clients(models, self.controller.replicas()),
            lambda: places or self.controller.connected,
            accounts,
        )
        routes = [
            *submit.routes(),
            *Subscribe(self._broker).routes(),
            *Responses(self._objects).routes(),
            # From another store clients fetch their results themselves.
            *(Results(self._objects).routes() if isinstance(self._objects, FileStore) else ()),
            *health.routes(),
            *(Admin(self.operations, token, settings).routes() if token else ()),
        ]
        self.app = gateway(
            routes, SocketIo(self._broker, settings), self._hub, self._lifespan, loopback=loopback
        )

    @classmethod
    def local(
        cls,
        config: DeploymentConfig,
        settings: Settings,
        results: Path,
        *,
        loopback: bool,
        trusted: bool = True,
        share_weights: bool = False,
        runtimes: Runtimes | None = None,
    ) -> Server:
        """One model, for one user."""
        return cls(
            settings,
            [config],
            results,
            loopback=loopback,
            accounts=OpenAccounts(hotswapping=False, trusted=trusted),
            trusted=trusted,
            places=False,
            share_weights=share_weights,
            runtimes=runtimes,
        )

    @classmethod
    def many(
        cls,
        settings: Settings,
        deployments: Sequence[DeploymentConfig],
        results: Path,
        *,
        token: str,
        loopback: bool,
        stop: Callable[[], None],
    ) -> Server:
        """Many models, for many users. `stop` ends the process that serves.

        Raises:
            KeysError: if the file of keys cannot be used.
        """
        accounts: Accounts = OpenAccounts(hotswapping=settings.hotswapping)
        if settings.api_keys is not None:
            accounts = FileAccounts(settings.api_keys.expanduser())
        return cls(
            settings,
            deployments,
            results,
            loopback=loopback,
            accounts=accounts,
            trusted=False,
            places=True,
            token=token,
            stop=stop,
        )

    def generations(self) -> list[str]:
        """The nnsight generations that are installed, the newest first."""
        return sorted(self._runtimes.installed(), key=Version, reverse=True)

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

    def http(self, listening: socket.socket) -> uvicorn.Server:
        """The HTTP server of this application, for an event loop to run."""
        host, port = listening.getsockname()[:2]
        return uvicorn.Server(
            uvicorn.Config(
                self.app,
                host=host,
                port=port,
                # Its errors go where ours do.
                log_config=None,
                log_level="warning",
                access_log=False,
                # Results are compressed already, and by their client's choice.
                ws_per_message_deflate=False,
                # What a hybrid job's client computed comes in one message.
                ws_max_size=self._settings.socketio_max_http_buffer_size,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._objects.start()
        await self.controller.discover()
        self.dispatcher.start()
        tasks = [asyncio.create_task(self._upkeep.run(), name="upkeep")]
        if self._places:
            tasks.append(asyncio.create_task(self._deploy(), name="first deployments"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.dispatcher.stop()
            await self.controller.stop()
            await self._evaluator.stop()
            await self._objects.stop()

    async def _deploy(self) -> None:
        """Have what the server was started with."""
        try:
            await self.operations.deploy(self._configs, None, wait=False, sync=False)
        except OperationError as error:
            logger.error("%s", error)  # noqa: TRY400 - the sentence is the message
        except Exception:
            logger.exception("what the server was started with could not be deployed")

    def _actor(self, config: DeploymentConfig, generation: str, place: Deployment) -> ModelActor:
        on_cpu = self._places and (place.on_cpu or not self._has_gpus)
        return ModelActor(
            config,
            self._runtimes.installed()[generation],
            self._settings,
            self._broker,
            self._objects,
            self._weights,
            untrusted=not self._trusted,
            gpu_mem_bytes_by_id=place.gpu_mem_bytes_by_id if self._places and not on_cpu else None,
            device="cpu" if on_cpu else None,
        )

    async def _evaluate(self, config: DeploymentConfig, generation: str) -> Measured:
        runtime = self._runtimes.installed().get(generation)
        if runtime is None:
            raise ActorError(
                f"nnsight {generation} is not installed here; `ndif runtime add {generation}` adds it"
            )
        found = await self._evaluator(config, runtime)
        return Measured(found.size_bytes, found.task, found.repo_id)

    async def _discover(self) -> list[Node]:
        """This machine, as it is declared or was found to be: a look that fails must not empty it."""
        if self._node is None:
            self._node = await self._this_machine()
        return [self._node]

    async def _this_machine(self) -> Node:
        found = await machine.gpus() if self._places else ()
        declared = self._settings.node_gpus
        gpus = parse_gpus(declared) if declared else found
        self._has_gpus = len(found) >= len(gpus) > 0
        if len(gpus) > len(found):
            logger.warning(
                "%d GPUs are declared (NDIF_NODE_GPUS) and %d are here: what is placed on them runs on "
                "the CPU",
                len(gpus),
                len(found),
            )
        memory = self._settings.node_cpu_memory
        cpu = size(memory) if memory else machine.cpu_memory()
        resources = Resources.of(gpus, cpu, self._settings.model_cache_percentage)
        return Node("local", machine.name(), resources)

    def _share(self, hosted: Hosted) -> None:
        """Answer the hub's routes for a model that is loaded."""
        config, loaded = hosted.model.config, hosted.actor.model
        # A user's choice of a revision is not what others build the model from.
        if "folder" in loaded and not (hosted.model.on_demand and config.revision):
            folder = Path(loaded["folder"])
            self._hub.serve(HubModel(config.repo_id, folder, config.revision, config.task))


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
    )


def _schedule(settings: Settings) -> ScheduleSource | None:
    return ScheduleSource(settings.schedule, zone=tzlocal()) if settings.schedule else None
