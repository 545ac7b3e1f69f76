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
from ndif.control.remote import (
    RemoteControlPlane,
    RemoteDetails,
    RemoteEvents,
    RemoteOverview,
    RemoteQueue,
)
from ndif.dashboard.dashboard import Dashboard
from ndif.gateway.app import Gateway, create_gateway, uvicorn_config
from ndif.gateway.catalogue import PublishedCatalogue
from ndif.gateway.hf_mirror import HfMirror, PublishedModels
from ndif.host.runtimes import Runtimes
from ndif.net import Http
from ndif.schema.repositories import Repositories
from ndif.server.heap import return_free_memory
from ndif.server.process_config import (
    ProcessConfig,
    announce_up,
    on_parent_exit,
)
from ndif.stores.accounts import AccountsWithProber, open_accounts
from ndif.stores.broker.redis.broker import RedisBroker
from ndif.stores.broker.signing import Signer
from ndif.stores.callbacks import CallbackLimits
from ndif.stores.callbacks.redis import RedisCallbacks
from ndif.stores.leader import LeaderRpc, SharedCache
from ndif.stores.objects import open_store
from ndif.stores.responder import Responder
from ndif.tasks import end
from ndif.telemetry import influxdb, logs


def create(
    settings: Settings, config: ProcessConfig, admin: socket.socket | None = None
) -> Gateway:
    """Return the HTTP application of one gateway process, with the operator's routes on `admin`, if any.

    It answers on a socket that all gateways share, and reads models and jobs from Redis and the object
    store. It sends operations to the leader over the broker; it knows neither the queue nor the cluster.
    """
    objects = open_store(settings, config.results, config.secret)
    broker = RedisBroker(
        config.broker_url or settings.broker_url,
        objects,
        Signer(config.cluster_secrets),
        inline_bytes=settings.broker_inline_bytes,
        max_bytes=settings.max_queued_bytes,
    )
    leader = LeaderRpc(broker.client, broker.signer)
    cache = SharedCache(broker.client, broker.signer)
    published = PublishedModels(cache, objects)
    mirror = HfMirror(share_weights=False, find=published.find)
    accounts = AccountsWithProber(open_accounts(settings), config.probe_keys)
    runtimes = Runtimes(settings.runtimes)
    callbacks = RedisCallbacks(
        broker.client, broker.signer, CallbackLimits(of_user=settings.max_callbacks)
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await objects.start()
        await broker.start()
        await accounts.start()
        mirroring = asyncio.create_task(published.run(mirror), name="mirror")
        try:
            yield
        finally:
            await end([mirroring])
            await broker.stop()
            await objects.stop()
            await accounts.stop()

    return create_gateway(
        settings,
        broker,
        objects,
        Responder(broker, objects, callbacks),
        PublishedCatalogue(
            broker.client,
            cache,
            settings.status_request_timeout_s,
            Repositories.of(settings),
            RemoteDetails(leader, settings.status_request_timeout_s),
        ),
        runtimes,
        accounts,
        mirror,
        lifespan,
        host=config.host,
        perform=RemoteControlPlane(leader, _stop, settings.status_request_timeout_s).perform,
        update_of=RemoteQueue(leader, broker).update_of,
        token=config.token,
        session_secrets=config.cluster_secrets,
        note=RemoteEvents(leader).note,
        callbacks=callbacks,
        callback_networks=settings.allowed_callback_networks,
        callback_secrets=settings.callback_secrets or config.cluster_secrets,
        pages=Dashboard(
            settings,
            accounts,
            runtimes,
            RemoteOverview(leader).next,
            host=config.host,
            places=True,
        ),
        admin=admin,
    )


def _stop() -> None:
    """Stop the supervising process, which then stops this one."""
    os.kill(os.getppid(), signal.SIGTERM)


def main() -> None:
    """Serve until told to stop."""
    settings = Settings()
    logs.configure("gateway", settings)
    return_free_memory()
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
