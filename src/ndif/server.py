"""The control plane of one process: every house in its embedded form, put together."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from ndif.cluster.controller import Controller
from ndif.config import Settings
from ndif.gateway.app import gateway
from ndif.gateway.health import Health
from ndif.gateway.hub import Hub, HubModel
from ndif.gateway.results import Results
from ndif.gateway.socket_io import SocketIo
from ndif.gateway.submit import Submit
from ndif.gateway.subscribe import Subscribe
from ndif.host.actor import ModelActor
from ndif.host.runtimes import Runtimes
from ndif.host.weights import Weights
from ndif.queue.dispatcher import Dispatcher
from ndif.queue.responder import Responder
from ndif.schema.deployment import DeploymentConfig
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import FileStore

_GRACE_S = 3
"""Seconds that open connections have to end when the server does."""


class Server:
    """One model, served to every installed nnsight generation."""

    def __init__(
        self,
        config: DeploymentConfig,
        settings: Settings,
        results: Path,
        *,
        loopback: bool,
        trusted: bool = True,
        share_weights: bool = False,
    ) -> None:
        self._settings = settings
        self._objects = FileStore(results, settings.result_ttl_s)
        broker = MemoryBroker()
        runtimes = Runtimes(settings.runtimes)
        responder = Responder(broker, self._objects)
        weights = Weights()
        self.controller = Controller(
            config,
            lambda config, generation: ModelActor(
                config,
                runtimes.installed()[generation],
                settings,
                broker,
                self._objects,
                weights,
                untrusted=not trusted,
            ),
        )
        self._dispatcher = Dispatcher(self.controller, broker, responder, settings)
        self._hub = Hub(share_weights=share_weights)
        submit = Submit(
            settings, broker, responder, runtimes, lambda: self.controller.config, trusted=trusted
        )
        routes = [
            *submit.routes(),
            *Subscribe(broker).routes(),
            *Results(self._objects).routes(),
            *Health(self.controller.status, lambda: self.controller.connected).routes(),
        ]
        self.app = gateway(
            routes, SocketIo(broker, settings), self._hub, self._lifespan, loopback=loopback
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._objects.start()
        self._dispatcher.start()
        try:
            yield
        finally:
            await self._dispatcher.stop()
            await self.controller.stop()
            await self._objects.stop()

    def share(self, folder: Path) -> None:
        """Answer the hub's routes for the model, whose files lie in `folder`."""
        config = self.controller.config
        self._hub.serve(HubModel(config.repo_id, folder, config.revision, config.task))

    def http(self, listening: socket.socket) -> uvicorn.Server:
        """The HTTP server of this application, for an event loop to run."""
        host, port = listening.getsockname()[:2]
        return uvicorn.Server(
            uvicorn.Config(
                self.app,
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                # Results are compressed already, and by their client's choice.
                ws_per_message_deflate=False,
                # What a hybrid job's client computed comes in one message.
                ws_max_size=self._settings.socketio_max_http_buffer_size,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
