"""The stores that the settings describe, for a server of one process or for one process of several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ndif.config.settings import Settings
from ndif.queue.callbacks.guard import CallbackRules
from ndif.schema.status import Status
from ndif.stores.accounts import Accounts, AccountsWithProber, open_accounts
from ndif.stores.broker import MemoryBroker
from ndif.stores.broker.spool import SPOOL, Spool
from ndif.stores.callbacks import CALLBACKS, CallbackLimits, SqliteCallbacks
from ndif.stores.objects import open_store
from ndif.stores.responder import DEFERRABLE, Responder
from ndif.stores.stores import Stores

if TYPE_CHECKING:
    # A server of one process has no client of Redis.
    from ndif.server.process_config import ProcessConfig
    from ndif.stores.broker.redis.broker import RedisBroker


def open_stores(
    settings: Settings,
    folder: Path,
    secret: str | None,
    accounts: Accounts,
    present: Mapping[str, bool],
) -> Stores[MemoryBroker]:
    """Return the stores of a server of one process, which keeps jobs and results in `folder`.

    `secret` signs the addresses of results. Jobs of an earlier process get the fields of `present`.

    Raises:
        BrokerError: If another server has the jobs of `folder`.
    """
    objects = open_store(settings, folder, secret)
    broker = MemoryBroker(settings.max_queued_bytes, Spool(folder / SPOOL, objects, present))
    callbacks = SqliteCallbacks(folder / CALLBACKS, CallbackLimits(of_user=settings.max_callbacks))
    responder = Responder(broker, objects, callbacks, deferred=DEFERRABLE)
    return Stores(broker, objects, callbacks, accounts, responder)


def callback_rules(settings: Settings, config: ProcessConfig) -> CallbackRules:
    """Return the rules for the webhooks and mails of a server of several processes."""
    secrets = settings.callback_secrets or config.cluster_secrets
    return CallbackRules(settings.allowed_callback_networks, secrets)


def open_shared_stores(
    settings: Settings, config: ProcessConfig, *, leads: bool
) -> Stores[RedisBroker]:
    """Return the stores of the leader, or of a gateway, of a server of several processes."""
    from ndif.stores.broker.redis.broker import RedisBroker
    from ndif.stores.broker.signing import Signer
    from ndif.stores.callbacks.redis import RedisCallbacks

    objects = open_store(settings, config.results, config.secret)
    broker = RedisBroker(
        config.broker_url or settings.broker_url,
        objects,
        Signer(config.cluster_secrets),
        inline_bytes=settings.broker_inline_bytes,
        # The leader resubmits jobs that were accepted before, so it has no limit.
        max_bytes=None if leads else settings.max_queued_bytes,
        counts_attempts=leads and not settings.ray_address,
    )
    limits = CallbackLimits(of_user=settings.max_callbacks)
    callbacks = RedisCallbacks(broker.client, broker.signer, limits)
    deferred: tuple[Status, ...] = ()
    if leads:
        # Replicas on other machines report DISPATCHED and every later update themselves.
        deferred = (Status.QUEUED,) if settings.ray_address else DEFERRABLE
    responder = Responder(broker, objects, callbacks, deferred=deferred)
    accounts = AccountsWithProber(open_accounts(settings), config.probe_keys)
    return Stores(broker, objects, callbacks, accounts, responder)
