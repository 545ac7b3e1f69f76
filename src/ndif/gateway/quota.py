"""Refusal of requests that exceed the limits of their API key."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache, TTLCache

from ndif.config.settings import Settings
from ndif.config.units import format_duration
from ndif.control.operations import GetUsage, Perform
from ndif.gateway.http_error import HttpError
from ndif.schema.deployment import OperationError
from ndif.schema.limits import KeyLimits
from ndif.stores.accounts import Account
from ndif.stores.rate_limiter import RatesUnavailableError

if TYPE_CHECKING:
    from ndif.stores.rate_limiter import Rates

logger = logging.getLogger(__name__)

_CACHED_S = 10.0
"""Seconds for which a user's execution time is cached."""
_MAX_CACHED = 4096


@dataclass
class Quota:
    """Checks a request against the limits of its key, before its body is read.

    Without an API key, only the limit on a model's queue applies. If requests or execution time cannot be
    counted, because the broker or the record of jobs is unavailable, the request is admitted.
    """

    settings: Settings
    perform: Perform
    rates: Rates
    _ran_s: TTLCache[str, float] = field(default_factory=lambda: TTLCache(_MAX_CACHED, _CACHED_S))
    """Seconds that each user's blocks ran today."""
    _limits: LRUCache[str, tuple[Mapping[str, Any] | None, KeyLimits]] = field(
        default_factory=lambda: LRUCache(_MAX_CACHED)
    )
    """By key: the key's own limits, and the result of merging them with the server's limits."""

    def __post_init__(self) -> None:
        self._keyless = KeyLimits(queue_depth=self.settings.max_queue_depth)

    def limits_of(self, account: Account) -> KeyLimits:
        """Return the limits of an account, merged with the server's limits."""
        if not account.key:
            return self._keyless
        key_limits, limits = self._limits.get(account.key, (None, self._keyless))
        if key_limits != account.limits:
            limits = KeyLimits.of(self.settings, account.limits)
            self._limits[account.key] = account.limits, limits
        return limits

    async def admit(self, account: Account, limits: KeyLimits) -> None:
        """Count a request; raise an `HttpError` (429, with Retry-After) if it exceeds a limit."""
        if limits.requests_per_minute is not None:
            await self._check_rate(account, limits.requests_per_minute)
        if limits.execution_s_per_day is not None:
            await self._check_execution_time(account, limits.execution_s_per_day)

    async def _check_rate(self, account: Account, limit: int) -> None:
        try:
            wait_s = await self.rates.take(account.key, limit)
        except RatesUnavailableError as error:
            logger.warning("requests are not counted: %s", error)
            return
        if wait_s > 0:
            raise HttpError(
                429,
                f"Your API key may send {limit} requests a minute, and has sent as many. Wait "
                f"{format_duration(math.ceil(wait_s))}, or send several traces in one `session`.",
                _retry(wait_s),
            )

    async def _check_execution_time(self, account: Account, limit_s: float) -> None:
        now = datetime.now(timezone.utc)
        ran_s = await self._ran_today(account.user, now)
        if ran_s >= limit_s:
            midnight = datetime.combine(now.date() + timedelta(days=1), datetime.min.time())
            wait_s = (midnight.replace(tzinfo=timezone.utc) - now).total_seconds()
            raise HttpError(
                429,
                f"Your blocks have run {format_duration(round(ran_s))} today, and may run "
                f"{format_duration(limit_s)} a day. The next day begins at midnight UTC; `ndif usage` or "
                "GET /usage shows what took the time.",
                _retry(wait_s),
            )

    async def _ran_today(self, user: str, now: datetime) -> float:
        cached = self._ran_s.get(user)
        if cached is not None:
            return cached
        operation = GetUsage(by="day", since=now.date().isoformat(), user=user)
        try:
            days = (await self.perform(operation)).usage
        except OperationError as error:
            logger.warning("the execution time of a day is not known: %s", error)
            days = []
        ran_s = float(sum(day.execution_s for day in days))
        self._ran_s[user] = ran_s
        return ran_s


def _retry(wait_s: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(wait_s)))}
