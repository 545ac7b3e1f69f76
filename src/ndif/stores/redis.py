"""Clients of Redis or Valkey, and their errors. Only servers with `NDIF_BROKER_URL` import this module."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from redis.asyncio import Redis as Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError

from ndif.config.groups import OLDEST_REDIS
from ndif.stores.broker.port import BrokerError, BrokerUnavailableError
from ndif.tasks import timeout

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S = 5.0
"""Seconds after which a server that does not answer counts as unreachable."""

_STALL_S = 1.0
"""Delay beyond a deadline that indicates a stalled process rather than a slow server."""

_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
_RETRIES = 2

_MAX_PENDING = 16
"""Maximum number of commands without an answer; each holds a connection."""

_BLOCKING = frozenset({"BLPOP", "XREAD", "XREADGROUP"})
"""Commands that wait in Redis, for less than `ANSWER_S` and without a limit on their number."""

_OPTIONS: dict[str, Any] = {
    # redis-py bounds writes with `asyncio.wait_for`, which loses cancellations before Python 3.12.
    "socket_timeout": None,
    "socket_connect_timeout": 2.0,
    # In RESP2, stream commands return one form in every version of redis-py.
    "protocol": 2,
    # Each blocking command holds a connection.
    "max_connections": 1 << 20,
}


class BrokerClient(Redis):
    """Redis client with a deadline for each command, whose errors are `BrokerError`.

    A command whose connection is lost is sent again on another, so Redis may run it twice.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._slots = asyncio.Semaphore(_MAX_PENDING)
        self._running: set[asyncio.Future[Any]] = set()
        self._answers = 0

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        command = super().execute_command
        with broker_errors():
            if args[0] in _BLOCKING:
                return await self._in_time(command(*args, **options))  # type: ignore[no-untyped-call]
            await self._acquire_slot()
            try:
                return await self._in_time(command(*args, **options))  # type: ignore[no-untyped-call]
            finally:
                self._slots.release()

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """See `Redis.aclose`. Commands without an answer fail."""
        for command in self._running:
            command.cancel()
        await super().aclose(close_connection_pool)

    async def _acquire_slot(self) -> None:
        """Wait for a free slot as long as the server answers other commands, else raise a TimeoutError.

        If the server answers none, all waiting commands fail at the same time.
        """
        while True:
            before = self._answers
            try:
                async with timeout(ANSWER_S):
                    await self._slots.acquire()
            except asyncio.TimeoutError:
                if self._answers == before:
                    raise
            else:
                return

    async def _in_time(self, command: Awaitable[T]) -> T:
        """Return the answer to `command`, which is cancelled if the server gives none for `ANSWER_S`."""
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(command)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            while not running.done():
                due = loop.time() + ANSWER_S
                await asyncio.wait([running], timeout=ANSWER_S)
                if not running.done() and loop.time() - due < _STALL_S:
                    raise asyncio.TimeoutError
        finally:
            running.cancel()
        if running.cancelled():
            raise RedisConnectionError("the client is closed")
        self._answers += 1
        return running.result()


def connect(url: str) -> Redis:
    """Return a client of the server at `url`, which connects when it is first used."""
    backoff = ExponentialBackoff(cap=_PAUSE_S, base=0.02)
    client: Redis = BrokerClient.from_url(url, **_OPTIONS, retry=Retry(backoff, _RETRIES))
    # Options of the URL override those above.
    client.connection_pool.connection_kwargs["protocol"] = _OPTIONS["protocol"]
    return client


def connect_for_pubsub(url: str) -> Redis:
    """Return a client whose `pubsub()` raises when its connection is lost.

    With retries, a `PubSub` reconnects silently, so that missed messages go unnoticed.
    """
    client: Redis = Redis.from_url(
        url, **_OPTIONS, retry=Retry(NoBackoff(), 0, supported_errors=())
    )
    return client


@contextlib.contextmanager
def broker_errors() -> Iterator[None]:
    """Turn a client's errors into `BrokerError`, except NOSCRIPT, BUSYGROUP and NOGROUP."""
    try:
        yield
    except (RedisError, OSError, asyncio.TimeoutError) as error:
        if isinstance(error, NoScriptError) or str(error).startswith(("BUSYGROUP", "NOGROUP")):
            raise
        # A script's error is a plain ResponseError in Redis 6.2 and Valkey.
        if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
            raise BrokerError(
                "its broker takes nothing more, as its memory is full (maxmemory of Redis)"
            ) from error
        logger.warning("Redis: %s", error)
        raise BrokerUnavailableError("its broker does not answer") from error


async def retry(work: Callable[[], Awaitable[T]], within_s: float) -> T:
    """Repeat `work` until it succeeds; after `within_s`, raise its `BrokerError`."""
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + within_s, _PAUSE_S
    while True:
        try:
            return await work()
        except BrokerError:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)


def is_too_old(version: str) -> bool:
    """Return True for a server's `redis_version` below `OLDEST_REDIS`."""
    actual, oldest = (tuple(map(int, text.split(".")[:2])) for text in (version, OLDEST_REDIS))
    return actual < oldest
