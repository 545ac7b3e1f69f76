"""The count of requests and logins in the last minutes, by one process or in Redis."""

from __future__ import annotations

import asyncio
import time
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limits.aio.strategies import MovingWindowRateLimiter

_MINUTE_S = 60.0


class RatesAwayError(Exception):
    """The counts cannot be reached now; the message says why."""


class Rates:
    """A window of some minutes for each name, which moves: no such time has more than its limit.

    The library `limits` keeps the windows; gateways of one server share them in Redis.
    """

    def __init__(self, broker_url: str) -> None:
        """Count in the Redis at `broker_url`, or in this process if that is empty."""
        self._url = broker_url
        self._limiter: MovingWindowRateLimiter | None = None

    async def take(self, name: str, most: int, minutes: int = 1) -> float:
        """Count one; return 0, or else the seconds until there is room for it. Raise `RatesAwayError`.

        In any so many minutes there is room for `most`.
        """
        if self._limiter is None:
            # A server whose keys have no rate needs none of this, and others are answered meanwhile.
            await asyncio.to_thread(import_module, "limits.aio.strategies")
        from limits import RateLimitItemPerMinute

        rate = RateLimitItemPerMinute(most, minutes)
        try:
            if await self._opened().hit(rate, name):
                return 0.0
            reset_at, left = await self._opened().get_window_stats(rate, name)
        except Exception as error:
            # The storage raises what its driver does, Redis or the system.
            raise RatesAwayError(str(error) or type(error).__name__) from error
        return 1.0 if left else min(minutes * _MINUTE_S, max(1.0, reset_at - time.time()))

    def _opened(self) -> MovingWindowRateLimiter:
        if self._limiter is None:
            from limits.aio.storage import MemoryStorage, RedisStorage
            from limits.aio.strategies import MovingWindowRateLimiter

            storage = (
                RedisStorage(f"async+{self._url}", implementation="redispy", key_prefix="rate")
                if self._url
                else MemoryStorage()
            )
            self._limiter = MovingWindowRateLimiter(storage)
        return self._limiter
