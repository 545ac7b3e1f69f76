"""The server of one process: every part in its embedded form, put together."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from ndif.cluster.fleet import ThisMachine
from ndif.cluster.model_files import ModelFinder
from ndif.cluster.replica import Replica
from ndif.cluster.status import client_status
from ndif.config.settings import Settings
from ndif.dashboard.dashboard import Dashboard
from ndif.gateway.app import create_gateway, uvicorn_config
from ndif.gateway.catalogue import InProcessCatalogue
from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.host.runtimes import Runtimes
from ndif.net import local_url
from ndif.queue.callbacks.delivery import open_delivery
from ndif.queue.callbacks.guard import EVERYWHERE
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.status import Status
from ndif.server.coordinator import Coordinator
from ndif.stores.accounts import (
    Accounts,
    AccountsWithProber,
    OpenAccounts,
    OwnerAccounts,
    open_accounts,
    probe_key_of,
)
from ndif.stores.broker import MemoryBroker
from ndif.stores.broker.spool import SPOOL, Spool
from ndif.stores.callbacks import CALLBACKS, CallbackLimits, SqliteCallbacks
from ndif.stores.events import EventLog, OperatorsEvent, SavedEvents
from ndif.stores.objects import open_store
from ndif.stores.ping import pings
from ndif.stores.responder import DEFERRABLE, Responder, StoredResponse
from ndif.stores.saved import ALERTS, EVENTS, StateFile
from ndif.stores.usage import MemoryUsage, open_usage
from ndif.telemetry import influxdb

if TYPE_CHECKING:
    from ndif.alerts.watch import Alerts


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
        owner_token: str | None = None,
        stop: Callable[[], None] = lambda: None,
        secret: str | None = None,
        admin: socket.socket | None = None,
    ) -> None:
        """Put the server together; its application's lifespan starts it.

        `host` is what the server listens on. `places`: True to serve many users, and measure models and
        place them; False to serve one user, and load each model where its options say. `owner_token` is
        what all but that user need, if anything. `secret` signs the URLs of results. `stop` ends the
        process. `admin` is the socket of the operator's routes, if they have one. If another server has
        the jobs of `results`, that is a `BrokerError`.
        """
        self._settings = settings
        self._url = ""
        """Address on this machine, once it listens."""
        self._results = results
        self._objects = open_store(settings, results, secret)
        # One user is trusted, or not, by the server as it was started now.
        present = {} if places else {"trusted": trusted}
        spool = Spool(results / SPOOL, self._objects, present)
        self._broker = MemoryBroker(settings.max_queued_bytes, spool)
        self._files = ModelFinder()
        self._hub = HfMirror(share_weights=share_weights, find=self._find)
        runtimes = runtimes or Runtimes(settings.runtimes)
        self._callbacks = SqliteCallbacks(
            results / CALLBACKS, CallbackLimits(of_user=settings.max_callbacks)
        )
        self._responder = responder = Responder(
            self._broker, self._objects, self._callbacks, deferred=DEFERRABLE
        )
        secrets = settings.callback_secrets or (secret or token_hex(),)
        # Code of the one user of a server that trusts it reaches every address by itself.
        is_own = trusted and not places
        networks = EVERYWHERE if is_own else settings.allowed_callback_networks
        self._fleet = fleet = ThisMachine(
            settings, self._broker, self._objects, runtimes, trusted=trusted, places=places
        )
        accounts: Accounts = OpenAccounts(hotswapping=False, trusted=trusted)
        if places:
            accounts = open_accounts(settings)
            if token:
                accounts = AccountsWithProber(accounts, (probe_key_of(token),))
        elif owner_token is not None:
            accounts = OwnerAccounts(os.geteuid(), owner_token, trusted=trusted)
        self._accounts = accounts
        # Without an operator there is nobody to read them.
        self._events = EventLog(StateFile(results, EVENTS, SavedEvents) if token else None)
        self._coordinator = Coordinator(
            settings,
            configs,
            self._broker,
            responder,
            fleet,
            runtimes,
            open_delivery(settings, self._callbacks, self._objects, secrets, networks),
            usage=open_usage(settings) if places else MemoryUsage(),
            places=places,
            alerts=self._open_alerts(),
            stop=stop,
            on_up=self._share,
            probe_key=probe_key_of(token) if places and token else "",
            events=self._events,
        )
        self.bring_up = self._coordinator.bring_up
        controller = self._coordinator.controller
        catalogue = InProcessCatalogue(
            controller.models,
            lambda: client_status(
                controller, self._coordinator.reconciler.coming(), self._coordinator.histories
            ),
            lambda: places or any(replica.serving for replica in controller.replicas()),
        )
        self._dashboard = Dashboard(
            settings, accounts, runtimes, self._coordinator.overview.next, host=host, places=places
        )
        self._gateway = create_gateway(
            settings,
            self._broker,
            self._objects,
            responder,
            catalogue,
            runtimes,
            accounts,
            self._hub,
            self._lifespan,
            update_of=self._update_of,
            host=host,
            perform=lambda operation: operation.perform(self._coordinator.control_plane),
            token=token,
            note=self._note,
            callbacks=self._callbacks,
            callback_networks=networks,
            callback_secrets=secrets,
            pages=self._dashboard,
            admin=admin,
        )
        self.app = self._gateway.app

    @property
    def unfinished(self) -> int:
        """Return the number of polled requests that the next server of these results will run."""
        return sum(map(self._broker.outlives, self._broker.unfinished))

    @property
    def is_polled(self) -> bool:
        """Return True if somebody may come back for a job, ended or not, or waits for its call-back."""
        stored = (any(self._results.glob(f"{folder}/*")) for folder in ("responses", "ends"))
        return self.unfinished > 0 or self._callbacks.left > 0 or any(stored)

    def uvicorn_config(self, listening: socket.socket) -> uvicorn.Config:
        """Return the configuration to serve this application on `listening`."""
        gateway = self._gateway
        self._url = local_url(*listening.getsockname()[:2])
        return uvicorn_config(gateway.app, gateway.incoming, self._settings, listening)

    async def farewell(self) -> None:
        """End the requests of connected clients as an ERROR, while they are connected; and open pages."""
        self._dashboard.close()
        await self._coordinator.fail_all()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with influxdb.writing(self._settings), self._running():
            yield

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        # Ends that have expired still tell the broker of what does not run again.
        await self._broker.start()
        await self._objects.start()
        await self._accounts.start()
        await self._responder.resume(self._broker.unfinished)
        await self._coordinator.start(url=self._url)
        try:
            yield
        finally:
            await self._coordinator.stop()
            await self._fleet.close()
            await self._callbacks.stop()
            await self._broker.stop()
            await self._objects.stop()
            await self._accounts.stop()

    def _open_alerts(self) -> Alerts | None:
        """Return what tells the operator of failures; None if nobody is to be told."""
        if not self._settings.sends_alerts:
            return None
        from ndif.alerts.watch import SavedAlerts, open_alerts

        stores = pings(self._broker, self._objects, self._accounts)
        saved = StateFile(self._results, ALERTS, SavedAlerts)
        return open_alerts(self._settings, saved, stores, self._objects.folder)

    async def _note(self, events: Sequence[OperatorsEvent]) -> None:
        for each in events:
            self._events.add(each)

    async def _update_of(self, request_id: str, stored: Status | None) -> StoredResponse | None:
        return self._coordinator.dispatcher.update_of(request_id, is_stored=stored is not None)

    def _find(self, repo_id: str) -> MirroredModel | None:
        """Return an accepted model of that name whose files are to be had."""
        for model in list(self._coordinator.controller.models):
            if model.called(repo_id) and (found := self._files.find(model)) is not None:
                return MirroredModel(*found)
        return None

    def _share(self, replica: Replica) -> None:
        """Serve the files of a loaded model on the hub's routes."""
        config, loaded = replica.model.config, replica.actor.model
        if loaded is not None and replica.model.provides_files:
            folder = Path(loaded.folder)
            self._hub.serve(MirroredModel(config.repo_id, folder, config.revision, config.task))
