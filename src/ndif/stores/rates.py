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


class RatesAwayError(Exception):
    """The counts cannot be reached now; the message says why."""


class Rates:
    """A window of some minutes for each name, which moves: no such time has more than its limit.

    Gateways of one server share the windows in Redis, where the library `limits` keeps them. Its form in
    memory looks at every name after each request, in threads.
    """

    def __init__(self, broker_url: str) -> None:
        """Count in the Redis at `broker_url`, or in this process if that is empty."""
        self._url = broker_url
        self._limiter: MovingWindowRateLimiter | None = None
        self._own = Windows()

    async def take(self, name: str, most: int, minutes: int = 1) -> float:
        """Count one; return 0, or else the seconds until there is room for it. Raise `RatesAwayError`.

        In any so many minutes there is room for `most`.
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
    """The times of what one name was given, oldest first."""

    length_s: float
    taken: deque[float] = field(default_factory=deque)


class Windows:
    """The windows of one process. Those in which nothing is left are forgotten, a minute later at most."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        self._swept = 0.0

    def take(self, name: str, most: int, length_s: float, now: float) -> float:
        """Count one at `now`; return 0, or else the seconds until there is room for it."""
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
