"""The server of one process: every part in its embedded form, put together."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from ndif.cluster.fleet import ThisMachine
from ndif.cluster.replica import Replica
from ndif.cluster.status import client_status
from ndif.config.settings import Settings
from ndif.gateway.app import create_gateway, uvicorn_config
from ndif.gateway.catalogue import InProcessCatalogue
from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.host.runtimes import Runtimes
from ndif.schema.deployment import DeploymentConfig
from ndif.server.coordinator import Coordinator
from ndif.stores.accounts import OpenAccounts, open_accounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import open_store
from ndif.stores.responder import Responder


class Server:
    """One process that serves models to every installed nnsight generation.

    Owns the stores, the broker and the coordinator, and starts and stops them with its application.
    """

    def __init__(
        self,
        settings: Settings,
        configs: Sequence[DeploymentConfig],
        results: Path,
        *,
        host: str,
        places: bool,
        trusted: bool = False,
        share_weights: bool = False,
        runtimes: Runtimes | None = None,
        token: str | None = None,
        stop: Callable[[], None] = lambda: None,
        secret: str | None = None,
    ) -> None:
        """Put the server together; its application's lifespan starts it.

        `host` is what the server listens on. `places`: True to serve many users, and measure models and
        place them; False to serve one user, and load each model where its options say. `secret` signs the
        URLs of results. `stop` ends the process.
        """
        self._settings = settings
        self._objects = open_store(settings, results, secret)
        self._broker = MemoryBroker(settings.max_queued_bytes)
        self._hub = HfMirror(share_weights=share_weights)
        runtimes = runtimes or Runtimes(settings.runtimes)
        responder = Responder(self._broker, self._objects)
        self._fleet = fleet = ThisMachine(
            settings, self._broker, self._objects, runtimes, trusted=trusted, places=places
        )
        self._coordinator = Coordinator(
            settings,
            configs,
            self._broker,
            responder,
            fleet,
            runtimes,
            places=places,
            stop=stop,
            on_up=self._share,
        )
        self.bring_up = self._coordinator.bring_up
        self.farewell = self._coordinator.fail_all
        """Ends every request as an ERROR, while clients are still connected."""
        controller = self._coordinator.controller
        catalogue = InProcessCatalogue(
            controller.models,
            lambda: client_status(controller, self._coordinator.reconciler.coming()),
            lambda: places or any(replica.serving for replica in controller.replicas()),
        )
        self.app = create_gateway(
            settings,
            self._broker,
            self._objects,
            responder,
            catalogue,
            runtimes,
            open_accounts(settings) if places else OpenAccounts(hotswapping=False, trusted=trusted),
            self._hub,
            self._lifespan,
            host=host,
            perform=lambda operation: operation.perform(self._coordinator.control_plane),
            token=token,
        ).app

    def uvicorn_config(self, listening: socket.socket) -> uvicorn.Config:
        """Return the configuration to serve this application on `listening`."""
        return uvicorn_config(self.app, self._settings, listening)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._objects.start()
        await self._broker.start()
        await self._coordinator.start()
        try:
            yield
        finally:
            await self._coordinator.stop()
            await self._fleet.close()
            await self._broker.stop()
            await self._objects.stop()

    def _share(self, replica: Replica) -> None:
        """Serve the files of a loaded model on the hub's routes."""
        config, loaded = replica.model.config, replica.actor.model
        if "folder" in loaded and replica.provides_files:
            folder = Path(loaded["folder"])
            self._hub.serve(MirroredModel(config.repo_id, folder, config.revision, config.task))
