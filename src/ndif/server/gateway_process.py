"""A gateway process of a server with a broker: `python -m ndif.server.gateway_process FILE PARENT_PIPE`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import uvloop
from starlette.applications import Starlette

from ndif.config.settings import Settings
from ndif.control.remote_leader import RemoteLeader
from ndif.dashboard.dashboard import Dashboard
from ndif.gateway.app import Gateway, GatewayOptions, create_gateway, uvicorn_config
from ndif.gateway.connection_limit import raise_descriptor_limit
from ndif.gateway.hf_mirror import HfMirror, PublishedModels
from ndif.host.runtimes import Runtimes
from ndif.net import Http
from ndif.schema.repositories import Repositories
from ndif.server.heap import return_free_memory
from ndif.server.open_stores import callback_rules, open_shared_stores
from ndif.server.process_config import (
    ProcessConfig,
    announce_up,
    on_parent_exit,
)
from ndif.stores.leader import LeaderRpc, SharedCache
from ndif.tasks import end
from ndif.telemetry import influxdb, logs


def create(
    settings: Settings, config: ProcessConfig, admin: socket.socket | None = None
) -> Gateway:
    """Return the HTTP application of one gateway process, with the operator's routes on `admin`, if any.

    It answers on a socket that all gateways share, and reads models and jobs from Redis and the object
    store. It sends operations to the leader over the broker; it has neither queue nor cluster.
    """
    stores = open_shared_stores(settings, config, leads=False)
    client, signer = stores.broker.client, stores.broker.signer
    cache = SharedCache(client, signer)
    leader = RemoteLeader(
        LeaderRpc(client, signer),
        cache,
        stores.broker,
        Repositories.of(settings),
        timeout_s=settings.status_request_timeout_s,
        stop=_stop,
    )
    published = PublishedModels(cache, stores.objects)
    mirror = HfMirror(share_weights=False, find=published.find)
    runtimes = Runtimes(settings.runtimes)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await stores.start()
        mirroring = asyncio.create_task(published.run(mirror), name="mirror")
        try:
            yield
        finally:
            await end([mirroring])
            await stores.stop()

    pages = Dashboard(
        settings, stores.accounts, runtimes, leader.next_state, host=config.host, many_users=True
    )
    rules = callback_rules(settings, config)
    options = GatewayOptions(config.host, rules, config.token, admin, config.cluster_secrets)
    return create_gateway(settings, options, stores, leader, runtimes, mirror, pages, lifespan)


def _stop() -> None:
    """Stop the supervising process, which then stops this one."""
    os.kill(os.getppid(), signal.SIGTERM)


def main() -> None:
    """Serve until stopped."""
    settings = Settings()
    logs.configure("gateway", settings)
    return_free_memory()
    raise_descriptor_limit()
    uvloop.run(_serve(settings, Path(sys.argv[1]), parent_pipe=int(sys.argv[2])))


async def _serve(settings: Settings, file: Path, parent_pipe: int) -> None:
    config = ProcessConfig.read(file)
    listening = socket.socket(fileno=config.listening)
    admin = None if config.admin is None else socket.socket(fileno=config.admin)
    gateway = create(settings, config, admin)
    server = Http(
        uvicorn_config(gateway.app, gateway.incoming, settings, listening),
        partial(announce_up, file),
        gateway.announce_shutdown,
    )
    on_parent_exit(parent_pipe, server.stop)
    async with influxdb.writing(settings):
        await server.serve(sockets=[listening, *([] if admin is None else [admin])])


if __name__ == "__main__":
    main()
