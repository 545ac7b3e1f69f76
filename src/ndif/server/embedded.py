"""The server of one process, with every part embedded."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from ndif.cluster.fleet import ThisMachine
from ndif.cluster.model_files import ModelFinder
from ndif.cluster.replica import Replica
from ndif.config.settings import Settings
from ndif.control.leader import InProcessLeader
from ndif.dashboard.dashboard import Dashboard
from ndif.gateway.app import GatewayOptions, create_gateway, uvicorn_config
from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.host.runtimes import Runtimes
from ndif.net import local_url
from ndif.queue.callbacks.guard import EVERYWHERE, CallbackRules
from ndif.schema.deployment import DeploymentConfig
from ndif.server.coordinator import Coordinator, Oversight
from ndif.server.open_stores import open_stores
from ndif.stores.accounts import (
    Accounts,
    AccountsWithProber,
    OpenAccounts,
    OwnerAccounts,
    open_accounts,
    probe_key_of,
)
from ndif.stores.broker import BrokerError, MemoryBroker
from ndif.stores.events import EventLog, SavedEvents
from ndif.stores.persisted_state import ALERTS, EVENTS, StateFile
from ndif.stores.stores import Stores
from ndif.telemetry import influxdb

if TYPE_CHECKING:
    from ndif.alerts.watch import Alerts


@dataclass(frozen=True)
class Owner:
    """The only user of a server without placement, which runs each model on its configured device."""

    trusted: bool
    """True if their code is not confined."""
    token: str | None = None
    """Token that every request needs; None if no request needs one."""
    share_weights: bool = False
    """True if clients may download the weights."""


@dataclass(frozen=True)
class Operator:
    """The operator of a server of many users."""

    token: str | None = None
    """Bearer token of `/admin/*`; None disables these routes."""
    stop: Callable[[], None] = lambda: None
    """End the process."""
    admin: socket.socket | None = None
    """Socket of the operator's routes; None if they are served beside the others."""


class Server:
    """One process that serves models to every installed nnsight generation.

    Owns the stores, the machine and the coordinator, and starts and stops them with its application.
    """

    def __init__(
        self,
        settings: Settings,
        configs: Sequence[DeploymentConfig],
        results: Path,
        whose: Owner | Operator,
        *,
        host: str,
        secret: str | None = None,
        runtimes: Runtimes | None = None,
    ) -> None:
        """Put the server together, or raise a `BrokerError` if another server has the jobs of `results`.

        `host` is the name or address that it listens on; `secret` signs the URLs of results.
        """
        self._settings, self._results = settings, results
        self._url, self._callbacks_left = "", 0
        owner = whose if isinstance(whose, Owner) else None
        operator = whose if isinstance(whose, Operator) else Operator()
        self._probe_key = probe_key_of(operator.token) if operator.token else ""
        runtimes = runtimes or Runtimes(settings.runtimes)
        self.stores = stores = _open_stores(settings, results, secret, whose)
        self._fleet = _machine(settings, stores, runtimes, owner)
        callbacks = _callback_rules(settings, secret, owner)
        self.coordinator = Coordinator(
            settings, configs, stores, self._fleet, runtimes, callbacks, self._oversight(operator)
        )
        self.coordinator.controller.on_up(self._share)
        self._files, shares = ModelFinder(), owner is not None and owner.share_weights
        self._hub = HfMirror(share_weights=shares, find=self._find)
        leader = InProcessLeader(self.coordinator.control_plane)
        many_users = owner is None
        self._dashboard = Dashboard(
            settings, stores.accounts, runtimes, leader.next_state, host=host, many_users=many_users
        )
        options = GatewayOptions(host, callbacks, operator.token, operator.admin)
        self._gateway = create_gateway(
            settings, options, stores, leader, runtimes, self._hub, self._dashboard, self._lifespan
        )
        self.app = self._gateway.app

    def _oversight(self, operator: Operator) -> Oversight:
        # Without an operator nobody reads the events.
        saved = StateFile(self._results, EVENTS, SavedEvents) if operator.token else None
        return Oversight(EventLog(saved), self._open_alerts(), operator.stop)

    @property
    def unfinished(self) -> int:
        """Return the number of polled requests that the next server of these results will run."""
        return sum(map(self.stores.broker.outlives, self.stores.broker.unfinished))

    @property
    def is_polled(self) -> bool:
        """Return True if a client may still poll for a job, ended or not, or expects a webhook or mail."""
        stored = (any(self._results.glob(f"{folder}/*")) for folder in ("responses", "ends"))
        return self.unfinished > 0 or self._callbacks_left > 0 or any(stored)

    def uvicorn_config(self, listening: socket.socket) -> uvicorn.Config:
        """Return the configuration to serve this application on `listening`."""
        gateway = self._gateway
        self._url = local_url(*listening.getsockname()[:2])
        return uvicorn_config(gateway.app, gateway.incoming, self._settings, listening)

    async def farewell(self) -> None:
        """Close open pages, and end requests as an ERROR while their clients are still connected."""
        self._dashboard.close()
        await self.coordinator.fail_all()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with influxdb.writing(self._settings), self._running():
            yield

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        await self.stores.start()
        await self.stores.responder.resume(self.stores.broker.unfinished)
        await self.coordinator.start(url=self._url, probe_key=self._probe_key)
        try:
            yield
        finally:
            await self.coordinator.stop()
            await self._fleet.close()
            with contextlib.suppress(BrokerError):
                self._callbacks_left, _ = await self.stores.callbacks.counts()
            await self.stores.stop()

    def _open_alerts(self) -> Alerts | None:
        if not self._settings.sends_alerts:
            return None
        from ndif.alerts.watch import SavedAlerts, open_alerts

        saved = StateFile(self._results, ALERTS, SavedAlerts)
        return open_alerts(self._settings, saved, self.stores.pings, self.stores.objects.folder)

    def _find(self, repo_id: str) -> MirroredModel | None:
        """Return an accepted model of that name whose files are available, or None."""
        for model in list(self.coordinator.controller.models):
            if model.called(repo_id) and (files := self._files.find(model)) is not None:
                return MirroredModel(*files)
        return None

    def _share(self, replica: Replica) -> None:
        """Serve the files of a loaded model on the hub's routes."""
        config, loaded = replica.model.config, replica.actor.model
        if loaded is not None and replica.model.provides_files:
            folder = Path(loaded.folder)
            self._hub.serve(MirroredModel(config.repo_id, folder, config.revision, config.task))


def _open_stores(
    settings: Settings, results: Path, secret: str | None, whose: Owner | Operator
) -> Stores[MemoryBroker]:
    if isinstance(whose, Owner):
        accounts: Accounts = OpenAccounts(hotswapping=False, trusted=whose.trusted)
        if whose.token is not None:
            accounts = OwnerAccounts(os.geteuid(), whose.token, trusted=whose.trusted)
        # Jobs of an earlier process are trusted if this process trusts its user.
        return open_stores(settings, results, secret, accounts, {"trusted": whose.trusted})
    accounts = open_accounts(settings)
    if whose.token:
        accounts = AccountsWithProber(accounts, (probe_key_of(whose.token),))
    return open_stores(settings, results, secret, accounts, {})


def _machine(
    settings: Settings, stores: Stores[MemoryBroker], runtimes: Runtimes, owner: Owner | None
) -> ThisMachine:
    return ThisMachine(
        settings,
        stores.broker,
        stores.objects,
        runtimes,
        trusted=owner is not None and owner.trusted,
        uses_placement=owner is None,
    )


def _callback_rules(settings: Settings, secret: str | None, owner: Owner | None) -> CallbackRules:
    # The code of a trusted owner can reach every address anyway.
    is_own = owner is not None and owner.trusted
    networks = EVERYWHERE if is_own else settings.allowed_callback_networks
    return CallbackRules(networks, settings.callback_secrets or (secret or token_hex(),))
