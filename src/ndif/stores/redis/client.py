"""Clients of Redis or Valkey, and their errors. Only servers with `NDIF_BROKER_URL` import this module."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, RedisError

from ndif.config.settings import OLDEST_REDIS
from ndif.stores.broker.port import BrokerError
from ndif.stores.redis import is_too_old
from ndif.stores.redis.pipelining import PipeliningRedis
from ndif.tasks import timeout

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_S = 2.0
_PAUSE_S = 0.2
_RETRIES = 2
_FULL = "OOM command not allowed"

_OPTIONS: dict[str, Any] = {
    # redis-py bounds reads with `asyncio.wait_for`, which loses cancellations before Python 3.12.
    "socket_timeout": None,
    "socket_connect_timeout": _CONNECT_S,
    # Each blocking command holds a connection.
    "max_connections": 1 << 20,
}


def connect(url: str) -> Redis:
    """Return a client of the server at `url`, which connects when it is first used."""
    client: Redis = PipeliningRedis.from_url(
        url,
        **_OPTIONS,
        retry=Retry(ExponentialBackoff(cap=_PAUSE_S, base=0.02), _RETRIES),
        retry_on_error=[RedisConnectionError],
    )
    return client


def connect_for_pubsub(url: str) -> Redis:
    """Return a client whose `pubsub()` raises when its connection is lost.

    With retries, a `PubSub` reconnects by itself, and does not say that messages may have been missed.
    """
    client: Redis = Redis.from_url(
        url, **_OPTIONS, retry=Retry(NoBackoff(), 0, supported_errors=())
    )
    return client


class broker_errors:  # noqa: N801 - reads as a function: `async with broker_errors():`
    """Context manager that turns the errors of a client into `BrokerError`.

    Each command has its own deadline; `within_s` is a deadline for the whole block.
    """

    def __init__(self, within_s: float | None = None) -> None:
        self._timeout = None if within_s is None else timeout(within_s)

    async def __aenter__(self) -> None:
        if self._timeout is not None:
            await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timeout is not None:
            try:
                await self._timeout.__aexit__(kind, error, trace)
            except asyncio.TimeoutError as late:
                error = late
        if not isinstance(error, (RedisError, OSError, asyncio.TimeoutError)):
            return
        # A script's error is a plain ResponseError in Redis 6.2 and Valkey.
        if isinstance(error, OutOfMemoryError) or _FULL in str(error):
            raise BrokerError(
                "its broker takes nothing more, as its memory is full (maxmemory of Redis)"
            ) from error
        logger.warning("Redis: %s", error)
        raise BrokerError("its broker does not answer") from error


async def retry(work: Callable[[], Awaitable[T]], within_s: float) -> T:
    """Repeat `work` until it succeeds: a broker that is restarted comes back.

    Raises:
        BrokerError: if it still fails after `within_s` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        try:
            async with broker_errors():
                return await work()
        except BrokerError:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_S)


async def check(client: Redis) -> None:
    """Check that the server answers and is new enough.

    Raises:
        BrokerError: if not.
    """
    async with broker_errors():
        version = str((await client.info("server"))["redis_version"])
    if is_too_old(version):
        raise BrokerError(f"its broker is Redis {version}; {OLDEST_REDIS} or newer is needed")


__all__ = ["Redis", "broker_errors", "check", "connect", "connect_for_pubsub", "retry"]
