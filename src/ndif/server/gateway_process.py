"""A gateway process of a server with a broker: `python -m ndif.server.gateway_process FILE PARENT_PIPE`."""

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

from ndif.config.settings import Settings
from ndif.control.remote import RemoteControlPlane
from ndif.gateway.app import create_gateway, uvicorn_config
from ndif.gateway.catalogue import PublishedCatalogue
from ndif.gateway.hf_mirror import HfMirror, PublishedHfMirror
from ndif.host.runtimes import Runtimes
from ndif.net import Http
from ndif.server.process_config import ProcessConfig, configure_logging, on_parent_exit
from ndif.stores.accounts import open_accounts
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.leader.rpc import LeaderRpc
from ndif.stores.leader.shared_cache import SharedCache
from ndif.stores.objects import open_store
from ndif.stores.responder import Responder
from ndif.tasks import end


class GatewayProcess:
    """The HTTP application of one gateway process.

    It answers on a socket that all gateways share, and reads models and jobs from Redis and the object
    store. It sends operations to the leader over the broker; it knows neither the queue nor the cluster.
    """

    def __init__(self, settings: Settings, config: ProcessConfig) -> None:
        self._objects = open_store(settings, config.results, config.secret)
        self._broker = RedisBroker(
            settings.broker_url,
            self._objects,
            inline_bytes=settings.broker_inline_bytes,
            max_bytes=settings.max_queued_bytes,
        )
        client, mirror = self._broker.client, HfMirror(share_weights=False)
        cache = SharedCache(client)
        self._scratch = TemporaryDirectory(prefix="ndif-mirror-", ignore_cleanup_errors=True)
        self._mirror = PublishedHfMirror(mirror, cache, self._objects, Path(self._scratch.name))
        self.gateway = create_gateway(
            settings,
            self._broker,
            self._objects,
            Responder(self._broker, self._objects),
            PublishedCatalogue(client, cache),
            Runtimes(settings.runtimes),
            open_accounts(settings),
            mirror,
            self._lifespan,
            loopback=config.loopback,
            perform=RemoteControlPlane(LeaderRpc(client), _stop).perform,
            token=config.token,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._objects.start()
        await self._broker.start()
        mirroring = asyncio.create_task(self._mirror.run(), name="mirror")
        try:
            yield
        finally:
            await end([mirroring])
            self._scratch.cleanup()
            await self._broker.stop()
            await self._objects.stop()


def _stop() -> None:
    """Stop the supervising process, which then stops this one."""
    os.kill(os.getppid(), signal.SIGTERM)


def main() -> None:
    """Serve until told to stop."""
    config = ProcessConfig.read(Path(sys.argv[1]))
    configure_logging()
    settings = Settings()
    listening = socket.socket(fileno=config.listening)
    uvloop.run(_serve(settings, config, listening, parent_pipe=int(sys.argv[2])))


async def _serve(
    settings: Settings, config: ProcessConfig, listening: socket.socket, parent_pipe: int
) -> None:
    gateway = GatewayProcess(settings, config).gateway
    server = Http(
        uvicorn_config(gateway.app, settings, listening), farewell=gateway.announce_shutdown
    )
    on_parent_exit(parent_pipe, server.stop)
    await server.serve(sockets=[listening])


if __name__ == "__main__":
    main()
