"""The connection to Redis or Valkey that every store on it uses; imported only where there is one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, RedisError

from ndif.stores.broker.port import BrokerError
from ndif.stores.redis.pipelining import PipeliningRedis
from ndif.tasks import timeout

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_S = 2.0
_PAUSE_S = 0.2
_RETRIES = 2
_OLDEST = (6, 2)
_FULL = "OOM command not allowed"


def connect(url: str) -> Redis:
    """A client of the server at `url`, which connects when it is first used."""
    client: Redis = PipeliningRedis.from_url(
        url,
        # Its own way to wait loses cancellations until Python 3.12: `asyncio.wait_for`.
        socket_timeout=None,
        socket_connect_timeout=_CONNECT_S,
        # What is waited for with a blocking command has a connection to itself.
        max_connections=1 << 20,
        retry=Retry(ExponentialBackoff(cap=_PAUSE_S, base=0.02), _RETRIES),
        retry_on_error=[RedisConnectionError],
    )
    return client


class speaking:  # noqa: N801 - read as a word: `async with speaking():`
    """Turn what the client raises into a `BrokerError`.

    Each command has its own time to be answered in; `within_s` is for what is more than one.
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
        # From within a script, Redis 6.2 and Valkey say it in the script's words.
        if isinstance(error, OutOfMemoryError) or _FULL in str(error):
            raise BrokerError(
                "its broker takes nothing more, as its memory is full (maxmemory of Redis)"
            ) from error
        logger.warning("Redis: %s", error)
        raise BrokerError("its broker does not answer") from error


async def persist(work: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Do it again until it works: a broker that is restarted comes back.

    Raises:
        BrokerError: if it has not worked for so many seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            async with speaking():
                return await work()
        except BrokerError:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_S)


async def check(client: Redis) -> None:
    """See that the server answers and is new enough.

    Raises:
        BrokerError: if not.
    """
    async with speaking():
        version = str((await client.info("server"))["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise BrokerError(f"its broker is Redis {version}; {needed} or newer is needed")


__all__ = ["Redis", "check", "connect", "persist", "speaking"]
