"""One gateway of a server of many processes: `python -m ndif.server.worker FILE LIFELINE`.

It answers on a socket that it shares with others, and ends when its lifeline does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from starlette.applications import Starlette

from ndif.config import Settings
from ndif.gateway.door import door, http
from ndif.gateway.hub import Hub
from ndif.gateway.published_catalogue import PublishedCatalogue
from ndif.gateway.published_hub import PublishedHub
from ndif.gateway.serving import Http
from ndif.host.runtimes import Runtimes
from ndif.queue.remote import RemoteOperations
from ndif.queue.responder import Responder
from ndif.server.part import Part, log_to_stderr, on_hang_up
from ndif.stores.accounts import open_accounts
from ndif.stores.broker.redis import RedisBroker
from ndif.stores.coordination.events import Events
from ndif.stores.coordination.notes import Notes
from ndif.stores.objects import open_store
from ndif.tasks import end


class Gateway:
    """Answers clients, and knows of models and jobs what Redis and the object store tell it."""

    def __init__(self, settings: Settings, part: Part) -> None:
        self._objects = open_store(settings, part.results, part.secret)
        self._broker = RedisBroker(
            settings.broker_url,
            self._objects,
            inline_bytes=settings.broker_inline_bytes,
            max_bytes=settings.max_queued_bytes,
        )
        client, hub = self._broker.client, Hub(share_weights=False)
        notes = Notes(client)
        self._scratch = TemporaryDirectory(prefix="ndif-hub-", ignore_cleanup_errors=True)
        self._hub = PublishedHub(hub, notes, self._objects, Path(self._scratch.name))
        self.door = door(
            settings,
            self._broker,
            self._objects,
            Responder(self._broker, self._objects),
            PublishedCatalogue(client, notes),
            Runtimes(settings.runtimes),
            open_accounts(settings),
            hub,
            self._lifespan,
            loopback=part.loopback,
            operations=RemoteOperations(Events(client), _stop),
            token=part.token,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._objects.start()
        await self._broker.start()
        following = asyncio.create_task(self._hub.run(), name="hub")
        try:
            yield
        finally:
            await end([following])
            self._scratch.cleanup()
            await self._broker.stop()
            await self._objects.stop()


def _stop() -> None:
    """End the server that started this process, which ends it in its turn."""
    os.kill(os.getppid(), signal.SIGTERM)


def main() -> None:
    """Serve until told to stop."""
    part = Part.read(Path(sys.argv[1]))
    log_to_stderr()
    settings = Settings()
    listening = socket.socket(fileno=part.listening)
    uvloop.run(_serve(settings, part, listening, lifeline=int(sys.argv[2])))


async def _serve(settings: Settings, part: Part, listening: socket.socket, lifeline: int) -> None:
    entrance = Gateway(settings, part).door
    serving = Http(http(entrance.app, settings, listening), farewell=entrance.farewell)
    on_hang_up(lifeline, serving.stop)
    await serving.serve(sockets=[listening])


if __name__ == "__main__":
    main()
