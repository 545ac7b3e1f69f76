"""Commands that are asked for at the same time, in one write and one read of one connection.

A command by itself costs the client library about as much as twenty in a batch. Those that come while
a batch is under way are the next: the more is asked, the fewer batches there are for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from ndif.tasks import timeout

ANSWER_S = 5.0
"""A Redis that does not answer for so long counts as away: nobody is to hang on it."""
_BLOCKING = frozenset({"BLPOP", "XREAD", "XREADGROUP"})
"""What waits in Redis has a connection to itself; it waits for less than `ANSWER_S`."""
_AT_ONCE = 256

_Command = tuple[tuple[Any, ...], dict[str, Any], "asyncio.Future[Any]"]


class BatchingRedis(Redis):
    """A client of Redis that sends its commands in batches, in the order in which they were asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._waiting: list[_Command] = []
        self._sending: asyncio.Task[None] | None = None
        self._held: Any = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """See `Redis.execute_command`."""
        if args[0] in _BLOCKING:
            async with timeout(ANSWER_S):
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((args, options, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="commands for Redis")
        return await answer

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """See `Redis.aclose`."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        await super().aclose(close_connection_pool)

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
                await self._send(batch)
        finally:
            self._sending = None

    async def _send(self, batch: list[_Command]) -> None:
        """Have every command of a batch answered, by what went wrong if need be."""
        try:
            async with timeout(ANSWER_S):
                await self._exchange(batch)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            await self._hang_up()
            # Those who wait have waited as long for the same server.
            waiting, self._waiting = self._waiting, []
            for _, _, answer in (*batch, *waiting):
                if not answer.done():
                    answer.set_exception(error)
        except BaseException:
            await self._hang_up()
            for _, _, answer in batch:
                answer.cancel()
            raise

    async def _exchange(self, batch: list[_Command]) -> None:
        if self._held is None:
            pool: Any = self.connection_pool
            self._held = await pool.get_connection()
        connection = self._held

        async def send_and_read() -> None:
            # What was answered before the connection was lost is not asked again.
            asked = [command for command in batch if not command[2].done()]
            packed = connection.pack_commands([args for args, _, _ in asked])
            await connection.send_packed_command(packed)
            for args, options, answer in asked:
                try:
                    said = await self.parse_response(connection, args[0], **options)
                except RedisConnectionError:
                    raise
                except RedisError as error:
                    if not answer.done():
                        answer.set_exception(error)
                else:
                    if not answer.done():
                        answer.set_result(said)

        async def reconnect(_: Exception) -> None:
            await connection.disconnect()

        await connection.retry.call_with_retry(send_and_read, reconnect)

    async def _hang_up(self) -> None:
        """Read no answer to what nobody waits for any more."""
        connection, self._held = self._held, None
        if connection is not None:
            await connection.disconnect()
            await self.connection_pool.release(connection)
