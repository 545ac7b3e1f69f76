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
_AT_ONCE = 64
_LARGE = 1 << 16
"""Nobody waits for the bytes of a command that has more of them than this."""

_ITS_OWN = (RedisError, OSError, asyncio.TimeoutError)
"""What goes wrong with a server, or on the way there."""

_Command = tuple[tuple[Any, ...], dict[str, Any], "asyncio.Future[Any]"]


class BatchingRedis(Redis):
    """A client of Redis that sends its commands in batches, in the order in which they were asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._encoder = self.get_encoder()  # type: ignore[no-untyped-call]
        self._waiting: list[_Command] = []
        self._sending: asyncio.Task[None] | None = None
        self._idle: list[Any] = []
        """Connections on which nothing is asked."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """See `Redis.execute_command`."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # What cannot be sent is its caller's mistake, and is not to be found in a batch.
        content = [self._encoder.encode(each) for each in args[1:]]
        command = (args[0], *content), options, answer
        if args[0] in _BLOCKING or sum(map(len, content)) > _LARGE:
            await self._send([command])
        else:
            self._waiting.append(command)
            if self._sending is None:
                self._sending = asyncio.create_task(self._send_all(), name="commands for Redis")
        return await answer

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """See `Redis.aclose`."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
            # Of a task that was cancelled before it began nothing has run.
            self._sending = None
            waiting, self._waiting = self._waiting, []
            _fail(waiting, RedisConnectionError("the connection is closed"))
        self._idle.clear()
        await super().aclose(close_connection_pool)

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
                try:
                    await self._send(batch)
                except BaseException as error:
                    # Those who wait have waited as long for the same server.
                    waiting, self._waiting = self._waiting, []
                    _fail([*batch, *waiting], error)
                    if not isinstance(error, Exception):
                        raise
        finally:
            self._sending = None

    async def _send(self, batch: list[_Command]) -> None:
        """Have every command of a batch answered.

        Raises:
            RedisError, OSError, asyncio.TimeoutError: if the server does not.
        """
        pool: Any = self.connection_pool
        connection: Any = None
        try:
            async with timeout(ANSWER_S):
                connection = self._idle.pop() if self._idle else await pool.get_connection()
                await self._exchange(connection, batch)
        except BaseException:
            if connection is not None:
                # What is still to come on it nobody waits for.
                await connection.disconnect()
                await pool.release(connection)
            raise
        self._idle.append(connection)

    async def _exchange(self, connection: Any, batch: list[_Command]) -> None:
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


def _fail(batch: list[_Command], error: BaseException) -> None:
    if isinstance(error, Exception) and not isinstance(error, _ITS_OWN):
        # A defect of ours is none of those who ask.
        error = RedisError(f"{type(error).__name__}: {error}")
    for _, _, answer in batch:
        if answer.done():
            continue
        if isinstance(error, Exception):
            answer.set_exception(error)
        else:
            answer.cancel()
