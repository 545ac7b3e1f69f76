"""The server of one process: every house in its embedded form, put together."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from ndif.cluster.fleet import ThisMachine
from ndif.cluster.hosted import Hosted
from ndif.cluster.status import for_clients
from ndif.config import Settings
from ndif.gateway.catalogue import OwnCatalogue
from ndif.gateway.door import door, http
from ndif.gateway.hub import Hub, HubModel
from ndif.host.runtimes import Runtimes
from ndif.queue.responder import Responder
from ndif.schema.deployment import DeploymentConfig
from ndif.server.coordinator import Coordinator
from ndif.stores.accounts import Accounts, OpenAccounts, open_accounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.objects import open_store


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
        secret: str | None = None,
    ) -> None:
        """`places`: whether models are measured and told where to go, or go where their options say.

        `secret`: with which addresses of results are signed.
        """
        self._settings = settings
        self._objects = open_store(settings, results, secret)
        self._broker = MemoryBroker(settings.max_queued_bytes)
        self._hub = Hub(share_weights=share_weights)
        runtimes = runtimes or Runtimes(settings.runtimes)
        responder = Responder(self._broker, self._objects)
        self._fleet = fleet = ThisMachine(
            settings, self._broker, self._objects, runtimes, trusted=trusted, places=places
        )
        self._coordinator = Coordinator(
            settings, configs, self._broker, responder, fleet, runtimes, places=places, stop=stop
        )
        self.controller = self._coordinator.controller
        self.controller.on_up = self._share
        self.bring_up = self._coordinator.bring_up
        models = self.controller.models
        catalogue = OwnCatalogue(
            models,
            lambda: for_clients(models, self.controller.replicas()),
            lambda: places or self.controller.connected,
        )
        self.app = door(
            settings,
            self._broker,
            self._objects,
            responder,
            catalogue,
            runtimes,
            accounts,
            self._hub,
            self._lifespan,
            loopback=loopback,
            operations=self._coordinator.operations,
            token=token,
        ).app

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
        secret: str,
        token: str,
        loopback: bool,
        stop: Callable[[], None],
    ) -> Server:
        """Many models, for many users. `stop` ends the process that serves.

        Raises:
            KeysError: if the file of keys cannot be used.
        """
        return cls(
            settings,
            deployments,
            results,
            loopback=loopback,
            accounts=open_accounts(settings),
            trusted=False,
            places=True,
            secret=secret,
            token=token,
            stop=stop,
        )

    def http(self, listening: socket.socket) -> uvicorn.Config:
        """How this application is served on `listening`."""
        return http(self.app, self._settings, listening)

    async def farewell(self) -> None:
        """End every request with a word to its client, while clients are still connected."""
        await self._coordinator.dismiss()

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

    def _share(self, hosted: Hosted) -> None:
        """Answer the hub's routes for a model that is loaded."""
        config, loaded = hosted.model.config, hosted.actor.model
        if "folder" in loaded and hosted.speaks_for_model:
            folder = Path(loaded["folder"])
            self._hub.serve(HubModel(config.repo_id, folder, config.revision, config.task))
