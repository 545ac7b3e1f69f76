"""A check that the stores of a server answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from ndif.stores.accounts import AccountsUnavailableError
from ndif.stores.broker.port import BrokerError
from ndif.stores.objects.port import ObjectStoreError
from ndif.tasks import within

Ping = Callable[[], Awaitable[None]]
"""Asks a store for an answer; raises its port's error if there is none."""


async def ask(stores: Mapping[str, Ping], patience_s: float) -> dict[str, Exception | None]:
    """Return, for each store, the error if it does not answer in `patience_s`, else None."""
    errors = await asyncio.gather(*(_error_of(ping, patience_s) for ping in stores.values()))
    return dict(zip(stores, errors, strict=True))


async def _error_of(ping: Ping, patience_s: float) -> Exception | None:
    try:
        await within(ping(), patience_s)
    except (BrokerError, ObjectStoreError, AccountsUnavailableError, asyncio.TimeoutError) as error:
        return error
    return None
