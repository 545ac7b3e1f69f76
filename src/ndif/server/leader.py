"""The coordinator of a server of many processes: `python -m ndif.server.lead FILE LIFELINE`.

One leads, the others stand by.

Who has lost the lead ends: the process that started it starts another, which stands by.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from ndif.cluster.fleet import Fleet, ThisMachine
from ndif.config import Settings
from ndif.host.replica import Replica
from ndif.host.runtimes import Runtimes
from ndif.queue.publishing import Publishing
from ndif.queue.remote import carry_out
from ndif.queue.responder import Responder
from ndif.queue.waiting_room import WaitingRoom
from ndif.schema.request import Request
from ndif.server.coordinator import Coordinator
from ndif.server.part import Part, log_to_stderr, on_hang_up
from ndif.stores.broker import BrokerError
from ndif.stores.broker.redis import RedisBroker
from ndif.stores.coordination.events import Events
from ndif.stores.coordination.lead import Lead
from ndif.stores.coordination.notes import Notes
from ndif.stores.objects import open_store
from ndif.tasks import end

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
_CLUSTER_LOST = (
    "The cluster that runs models cannot be reached. Your job waits, and runs when it is back."
)


class Leader:
    """Stands by until it leads, and leads until it is told to stop or another does."""

    def __init__(self, settings: Settings, part: Part) -> None:
        self.settings = settings
        self._part = part
        self._objects = open_store(settings, part.results, part.secret)
        self._broker = RedisBroker(
            settings.broker_url, self._objects, inline_bytes=settings.broker_inline_bytes
        )
        self._responder = Responder(self._broker, self._objects)
        self._lead = Lead(self._broker.client)
        self._runtimes = self.runtimes()
        self.told_to_stop = asyncio.Event()

    async def run(self) -> None:
        """Stand by, lead, end."""
        stopping = asyncio.create_task(self.told_to_stop.wait())
        standing_by = asyncio.create_task(self._stand_by())
        await asyncio.wait({stopping, standing_by}, return_when=asyncio.FIRST_COMPLETED)
        if standing_by.done():
            standing_by.result()
            await self._lead_until(stopping)
        else:
            await end([standing_by])
        stopping.cancel()
        await self._lead.leave()
        await self._broker.stop()

    async def _lead_until(self, stopping: asyncio.Task[Any]) -> None:
        """Lead until told to stop, or until another leads, or there is nothing left to lead."""
        fleet = self.fleet()
        replaced = asyncio.create_task(self._lead.lost.wait())
        room = WaitingRoom(self._broker, self._responder, _CLUSTER_LOST)
        connecting = asyncio.create_task(fleet.connect(room.open))
        lost = asyncio.create_task(fleet.lost.wait())
        try:
            await asyncio.wait(
                {stopping, replaced, connecting}, return_when=asyncio.FIRST_COMPLETED
            )
            if connecting.done():
                connecting.result()
                async with self._leading(fleet, await room.close()) as coordinator:
                    await asyncio.wait(
                        {stopping, replaced, lost}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if lost.done():
                        await coordinator.dispatcher.tell_everybody(_CLUSTER_LOST)
        finally:
            await end([replaced, connecting, lost])
            await room.close()
            await fleet.close()

    def runtimes(self) -> Runtimes:
        """Those that tell what models take."""
        return Runtimes(self.settings.runtimes)

    def replica(self) -> type[Replica]:
        """What is started on the nodes of a cluster."""
        from ndif.server.node_replica import NodeReplica

        return NodeReplica

    def fleet(self) -> Fleet:
        """The machines of a Ray cluster, or this one."""
        settings = self.settings
        if settings.ray_address:
            # What one machine does not need it does not import.
            from ndif.cluster.ray_cluster import RayCluster
            from ndif.stores.broker.redis_lanes import Lanes

            return RayCluster(settings.ray_address, self.replica(), Lanes(self._broker))
        return ThisMachine(
            settings,
            self._broker,
            self._objects,
            self._runtimes,
            trusted=False,
            places=True,
            shares=True,
        )

    async def _stand_by(self) -> None:
        while True:
            try:
                await self._broker.start()
                break
            except BrokerError as error:
                logger.warning("this process cannot stand by: %s", error)
                await asyncio.sleep(_AGAIN_S)
        logger.info("Standing by")
        await self._lead.taken()
        logger.info("Leading")

    @contextlib.asynccontextmanager
    async def _leading(self, fleet: Fleet, waited: Sequence[Request]) -> AsyncIterator[Coordinator]:
        settings, client = self.settings, self._broker.client
        coordinator = Coordinator(
            settings,
            self._part.deployments,
            self._broker,
            self._responder,
            fleet,
            self._runtimes,
            places=True,
        )
        await self._objects.start()
        await coordinator.start(waited)
        publishing = Publishing(coordinator.controller, Notes(client), settings.status_cache_freq_s)
        tasks = [
            asyncio.create_task(publishing.run(), name="publishing"),
            asyncio.create_task(
                Events(client).serve(partial(carry_out, coordinator.operations)), name="events"
            ),
        ]
        try:
            yield coordinator
        finally:
            await end(tasks)
            await coordinator.stop()
            await self._objects.stop()


async def _run(leader: Leader, lifeline: int) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, leader.told_to_stop.set)
    on_hang_up(lifeline, leader.told_to_stop.set)
    await leader.run()


def main(kind: type[Leader] = Leader) -> None:
    """Stand by or lead until told to stop."""
    part = Part.read(Path(sys.argv[1]))
    log_to_stderr()
    uvloop.run(_run(kind(Settings(), part), lifeline=int(sys.argv[2])))


if __name__ == "__main__":
    main()
