"""The count of requests and logins in the last minutes, by one process or in Redis."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limits.aio.strategies import MovingWindowRateLimiter

_MINUTE_S = 60.0


class RatesUnavailableError(Exception):
    """The counts cannot be reached now; the message says why."""


class Rates:
    """Rate limits by name, in moving windows of some minutes.

    Gateways of one server share the windows in Redis, through the library `limits`. Its form in memory is
    not used, because it checks every name after each request, in threads.
    """

    def __init__(self, broker_url: str) -> None:
        """Count in the Redis at `broker_url`, or in this process if that is empty."""
        self._url = broker_url
        self._limiter: MovingWindowRateLimiter | None = None
        self._own = Windows()

    async def take(self, name: str, most: int, minutes: int = 1) -> float:
        """Count a request and return 0; if the limit is reached, return the seconds until there is room.

        Any window of `minutes` has room for `most` requests. Raise a `RatesUnavailableError` if Redis does
        not answer.
        """
        window_s = minutes * _MINUTE_S
        wait_s = (
            await self._take_in_redis(name, most, minutes)
            if self._url
            else self._own.take(name, most, window_s, time.monotonic())
        )
        return min(window_s, max(1.0, wait_s)) if wait_s else 0.0

    async def _take_in_redis(self, name: str, most: int, minutes: int) -> float:
        if self._limiter is None:
            # Imported only if keys have a rate, and in a thread, to keep the event loop free.
            await asyncio.to_thread(import_module, "limits.aio.strategies")
        from limits import RateLimitItemPerMinute

        rate = RateLimitItemPerMinute(most, minutes)
        try:
            if await self._opened().hit(rate, name):
                return 0.0
            reset_at, left = await self._opened().get_window_stats(rate, name)
        except Exception as error:
            # The storage passes on errors of Redis and of the system.
            raise RatesUnavailableError(str(error) or type(error).__name__) from error
        return 1.0 if left else max(1.0, reset_at - time.time())

    def _opened(self) -> MovingWindowRateLimiter:
        if self._limiter is None:
            from limits.aio.storage import RedisStorage
            from limits.aio.strategies import MovingWindowRateLimiter

            storage = RedisStorage(
                f"async+{self._url}", implementation="redispy", key_prefix="rate"
            )
            self._limiter = MovingWindowRateLimiter(storage)
        return self._limiter


@dataclass
class _Window:
    """The times of the counted requests of one name, the oldest first."""

    length_s: float
    taken: deque[float] = field(default_factory=deque)


class Windows:
    """The windows of one process; `take` deletes empty ones, at most once a minute."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        self._swept = 0.0

    def take(self, name: str, most: int, length_s: float, now: float) -> float:
        """Count a request at `now` and return 0, or else return the seconds until there is room."""
        self._sweep(now)
        window = self._windows.setdefault(name, _Window(length_s))
        window.length_s, taken = length_s, window.taken
        while taken and taken[0] <= now - length_s:
            taken.popleft()
        if len(taken) >= most:
            # There is room once the oldest of the last `most` leaves the window.
            return (taken[-most] if most else now) + length_s - now
        taken.append(now)
        return 0.0

    def _sweep(self, now: float) -> None:
        if now - self._swept < _MINUTE_S:
            return
        self._swept = now
        for name, window in [*self._windows.items()]:
            if not window.taken or window.taken[-1] <= now - window.length_s:
                del self._windows[name]
