"""The question whether a store answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ndif.stores.accounts import AccountsAwayError
from ndif.stores.broker.port import BrokerError
from ndif.stores.objects.port import ObjectStoreError
from ndif.tasks import within

Ping = Callable[[], Awaitable[None]]
"""Asks a store for an answer; raises its port's error if there is none."""


async def silence(ping: Ping, patience_s: float) -> Exception | None:
    """Return the error of a store that does not answer in that time; None if it does."""
    try:
        await within(ping(), patience_s)
    except (BrokerError, ObjectStoreError, AccountsAwayError, asyncio.TimeoutError) as error:
        return error
    return None
