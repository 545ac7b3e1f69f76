"""The dispatcher process of a server with a broker: `python -m ndif.server.leader FILE PARENT_PIPE`.

One of several such processes holds the leader lock and leads; the others stand by. A process that loses the
lock ends, and its supervisor starts it again to stand by.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from ndif.cluster.fleet import Fleet, ThisMachine
from ndif.cluster.model_files import ModelFilesStorage
from ndif.cluster.remote_actor import RemoteActor
from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.control.publisher import Publisher
from ndif.control.remote_leader import answer_call
from ndif.gateway.connection_limit import raise_descriptor_limit
from ndif.host.runtimes import Runtimes
from ndif.net import STOP_SIGNALS
from ndif.queue.dispatcher import HoldingQueue
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.schema.status import Status
from ndif.server.coordinator import Coordinator, Oversight
from ndif.server.heap import return_free_memory
from ndif.server.open_stores import callback_rules, open_shared_stores
from ndif.server.process_config import ProcessConfig, announce_up, on_parent_exit
from ndif.stores.broker import BrokerError
from ndif.stores.broker.spool import SPOOL, Spool
from ndif.stores.callbacks import CALLBACKS, SqliteCallbacks
from ndif.stores.events import EventLog, SavedEvents
from ndif.stores.leader import LeaderLock, LeaderRpc, SharedCache
from ndif.stores.objects import ObjectStoreError
from ndif.stores.persisted_state import ALERTS, EVENTS, SharedState
from ndif.tasks import end
from ndif.telemetry import influxdb, logs

if TYPE_CHECKING:
    from ndif.alerts.watch import Alerts

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_PAGE = 100
_WAITS = "The server has started again, and your job waits for its turn."
_CLUSTER_LOST = (
    "The cluster that runs models cannot be reached. Your job waits, and runs when it is back."
)


class LeaderCandidate:
    """One candidate for the lead of a server.

    It takes the leader lock, connects to the machines that run replicas, and then runs a `Coordinator`. It
    ends when it is stopped, when another process leads, or when the cluster is lost. Requests that arrive
    while the cluster cannot be reached wait in a `HoldingQueue`.
    """

    def __init__(
        self, settings: Settings, config: ProcessConfig, up: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare a candidate, which calls `up` when it leads, or waits for the lock or the cluster."""
        self.settings = settings
        self._up = up
        self._config = config
        self.stores = open_shared_stores(settings, config, leads=True)
        broker = self.stores.broker
        self._cache = SharedCache(broker.client, broker.signer)
        self._lock = LeaderLock(broker.client)
        self._runtimes = self.runtimes()
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        """Stand by, then lead, until `stopping` is set or the lead is lost."""
        stopping = asyncio.create_task(self.stopping.wait())
        standing_by = asyncio.create_task(self._stand_by())
        await asyncio.wait({stopping, standing_by}, return_when=asyncio.FIRST_COMPLETED)
        if standing_by.done():
            standing_by.result()
            await self._lead_until(stopping)
        await end([stopping, standing_by])
        await self._lock.leave()
        await self.stores.stop()

    async def _lead_until(self, stopping: asyncio.Task[Any]) -> None:
        """Lead until stopped, until another process leads, or until the cluster is lost."""
        fleet = self.fleet()
        replaced = asyncio.create_task(self._lock.lost.wait())
        holding = HoldingQueue(self.stores.broker, self.stores.responder, _CLUSTER_LOST)

        def wait() -> None:
            holding.open()
            self._up()

        connecting = asyncio.create_task(fleet.connect(wait))
        lost = asyncio.create_task(fleet.lost.wait())
        try:
            await asyncio.wait(
                {stopping, replaced, connecting}, return_when=asyncio.FIRST_COMPLETED
            )
            if connecting.done():
                connecting.result()
                async with self._leading(fleet, await holding.close()) as coordinator:
                    self._up()
                    await asyncio.wait(
                        {stopping, replaced, lost}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if lost.done():
                        await coordinator.dispatcher.notify_waiting(_CLUSTER_LOST)
        finally:
            await end([replaced, connecting, lost])
            await holding.close()
            await fleet.close()

    def runtimes(self) -> Runtimes:
        """Return the runtimes in which models are measured."""
        return Runtimes(self.settings.runtimes)

    def replica(self) -> type[RemoteActor]:
        """Return the class of the actors that run on a cluster's nodes."""
        from ndif.server.node_actor import NodeActor

        return NodeActor

    def fleet(self) -> Fleet:
        """Return the machines of a Ray cluster, or this machine alone."""
        settings, broker, objects = self.settings, self.stores.broker, self.stores.objects
        if settings.ray_address:
            # Imported only where a cluster is configured.
            from ndif.cluster.ray.cluster import RayCluster
            from ndif.stores.broker.redis.job_channels import JobSender

            return RayCluster(settings.ray_address, self.replica(), JobSender(broker))
        return ThisMachine(
            settings,
            broker,
            objects,
            self._runtimes,
            trusted=False,
            uses_placement=True,
            shares=True,
        )

    async def _stand_by(self) -> None:
        while True:
            try:
                await self.stores.broker.start()
                break
            except BrokerError as error:
                again = format_duration(_RETRY_S)
                logger.warning("Cannot stand by: %s; retrying in %s", error, again)
                await asyncio.sleep(_RETRY_S)
        logger.info("Standing by")
        await self._lock.taken(waiting=self._up)
        logger.info("Leading")

    async def take_spooled(self) -> None:
        """Submit the polled requests that a server without a broker left in the folder of results."""
        folder = self._config.results / SPOOL
        if not folder.is_dir():
            return
        try:
            spool = Spool(folder, self.stores.objects)
            try:
                for request, _ in await spool.unfinished():
                    payload = await spool.payload(request.id)
                    # The client now polls another store, which must also report that the job waits.
                    await self.stores.responder.respond(
                        request, Response(request.id, Status.QUEUED, _WAITS)
                    )
                    await self.stores.broker.submit(replace(request, payload=payload))
                    spool.remove(request.id)
            finally:
                await spool.close()
        except (BrokerError, ObjectStoreError) as error:
            logger.warning("Jobs wait in %s for the next start: %s", folder, error)

    async def take_callbacks(self) -> None:
        """Queue the webhooks and mails that a server without a broker left beside its results."""
        folder = self._config.results / CALLBACKS
        if not folder.is_dir():
            return
        try:
            callbacks = SqliteCallbacks(folder)
            try:
                while page := await callbacks.all(_PAGE):
                    for callback in page:
                        await self.stores.callbacks.update(callback)
                        await callbacks.remove(callback.id)
            finally:
                await callbacks.stop()
        except BrokerError as error:
            logger.warning("Webhooks and mails wait in %s for the next start: %s", folder, error)

    def _alerts(self) -> Alerts | None:
        if not self.settings.sends_alerts:
            return None
        from ndif.alerts.watch import SavedAlerts, open_alerts

        saved = SharedState(self._cache, ALERTS, SavedAlerts)
        return open_alerts(self.settings, saved, self.stores.pings, self.stores.objects.folder)

    @contextlib.asynccontextmanager
    async def _leading(self, fleet: Fleet, held: Sequence[Request]) -> AsyncIterator[Coordinator]:
        settings, config, stores = self.settings, self._config, self.stores
        events = EventLog(SharedState(self._cache, EVENTS, SavedEvents))
        coordinator = Coordinator(
            settings,
            config.deployments,
            stores,
            fleet,
            self._runtimes,
            callback_rules(settings, config),
            Oversight(events, self._alerts()),
        )
        await self.take_callbacks()
        await self.take_spooled()  # while stored ends still show the jobs that must not run again
        await stores.objects.start()
        await coordinator.start(held, config.url(), config.probe_keys[0])
        controller = coordinator.controller
        model_files = ModelFilesStorage(controller.models, stores.objects)
        publisher = Publisher(
            controller,
            model_files,
            self._cache,
            settings.status_cache_freq_s,
            coordinator.reconciler.coming,
            coordinator.histories,
        )
        rpc = LeaderRpc(stores.broker.client, stores.broker.signer)
        calls = rpc.serve(partial(answer_call, coordinator.control_plane))
        tasks = [
            asyncio.create_task(model_files.run(), name="files of models"),
            asyncio.create_task(publisher.run(), name="publishing"),
            asyncio.create_task(calls, name="events"),
        ]
        try:
            yield coordinator
        finally:
            await end(tasks)
            await coordinator.stop()


async def _run(leader: LeaderCandidate, parent_pipe: int) -> None:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, leader.stopping.set)
    on_parent_exit(parent_pipe, leader.stopping.set)
    async with influxdb.writing(leader.settings):
        await leader.run()


def main(kind: type[LeaderCandidate] = LeaderCandidate) -> None:
    """Stand by or lead until stopped."""
    file = Path(sys.argv[1])
    config = ProcessConfig.read(file)
    os.environ.update(config.ray_variables)  # before Ray is imported
    settings = Settings()
    logs.configure("dispatcher", settings)
    leader = kind(settings, config, partial(announce_up, file))
    return_free_memory()
    raise_descriptor_limit()
    uvloop.run(_run(leader, parent_pipe=int(sys.argv[2])))


if __name__ == "__main__":
    main()
