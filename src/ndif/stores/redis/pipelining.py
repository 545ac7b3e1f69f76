"""A Redis client whose concurrent commands share one connection, none waiting for the answer to another.

A command of redis-py's own takes a connection from a pool and returns it, for about 117 µs of CPU time, or
76 with 32 at once; one that is sent here takes 84, or 24 (medians, busy two-core machine, redis-py 8.1).
redis-py's own pipelines save nothing on a command that comes alone, as most do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from ndif.tasks import end

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Seconds after which a server that does not answer counts as unreachable."""

_STALL_S = 1.0
"""A timer that fires this much too late says that this process stood still, and nothing of the server."""

_MAX_LOSSES = 2
"""Connections that may be lost in a row before the commands on them fail."""

_PAUSE_S = 0.02
"""Pause before the first new connection; each further one takes twice as long."""

_LARGE = 1 << 16
"""A command with a larger argument uses a connection of its own, so that no other waits for its bytes."""

_BLOCKING = frozenset({"BLPOP", "XREAD", "XREADGROUP"})
"""Commands that wait in Redis, each on a connection of its own and for less than `ANSWER_S`."""

_UNREACHABLE = (RedisError, OSError, asyncio.TimeoutError)
"""Errors of a server, or of the way to it."""


@dataclass(slots=True)
class _Command:
    args: tuple[Any, ...]
    answer: asyncio.Future[Any]
    sent: float


class PipeliningRedis(Redis):
    """Redis client that sends commands at once, on one connection, in the order in which they are called.

    Owns one connection and the task that reads its answers. Commands without an answer are sent again when
    the connection is lost, so Redis may run a command twice.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._encoder = self.get_encoder()  # type: ignore[no-untyped-call]
        self._unanswered: deque[_Command] = deque()
        self._link: Any = None
        """The connection; None while there is none that works."""
        self._reader: asyncio.Task[None] | None = None
        self._losses = 0
        self._answered = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """See `Redis.execute_command`.

        Raises:
            RedisError, OSError, asyncio.TimeoutError: if the command fails, or the server does not answer.
        """
        # An argument that cannot be encoded fails here, before any other command is concerned.
        args = (args[0], *map(self._encoder.encode, args[1:]))
        if args[0] in _BLOCKING or any(len(arg) > _LARGE for arg in args):
            exchange: Awaitable[Any] = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
            return await _in_time(exchange)
        loop = asyncio.get_running_loop()
        command = _Command(args, loop.create_future(), loop.time())
        self._unanswered.append(command)
        if self._alarm is None:
            self._set_alarm(command.sent + ANSWER_S)
        if self._link is not None:
            await self._send(self._link, [command])
        elif self._reader is None:
            self._reader = asyncio.create_task(self._read_forever(), name="answers of Redis")
        answer = await command.answer
        callback = self.response_callbacks.get(args[0])
        options.pop("keys", None)  # a hint for redis-py's cache
        return answer if callback is None else callback(answer, **options)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """See `Redis.aclose`. Commands without an answer fail."""
        reader = self._fail(RedisConnectionError("the connection is closed"))
        if reader is not None:
            await end([reader])
        await super().aclose(close_connection_pool)

    async def _send(self, link: Any, commands: list[_Command]) -> None:
        """Write commands to a connection. If that fails, its reader sends them on the next one."""
        try:
            packed = link.pack_commands([command.args for command in commands])
            await link.send_packed_command(packed, check_health=False)
        except _UNREACHABLE:
            if self._link is link:
                self._link = None

    async def _read_forever(self) -> None:
        """Connect, send what has no answer, and read answers, until nothing waits or the server is lost."""
        pool: Any = self.connection_pool
        while True:
            link: Any = None
            try:
                link = self._link = await pool.get_connection()
                waiting = [each for each in self._unanswered if not each.answer.done()]
                self._unanswered = deque(waiting)
                await self._send(link, waiting)
                await self._read(link)
            except _UNREACHABLE as error:
                self._losses += 1
                if self._losses > _MAX_LOSSES or not self._unanswered:
                    self._reader = None
                    self._fail(error)
                    return
            except Exception as error:
                logger.exception("answers of Redis cannot be read")
                self._reader = None
                self._fail(RedisError(f"{type(error).__name__}: {error}"))
                return
            finally:
                if link is not None:
                    if self._link is link:
                        self._link = None
                    await link.disconnect(nowait=True)
                    await pool.release(link)
            await asyncio.sleep(_PAUSE_S * 2**self._losses)

    async def _read(self, link: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            answer: Any
            try:
                answer = await link.read_response(disconnect_on_error=False)
            except ResponseError as error:
                answer = error
            self._losses, self._answered = 0, loop.time()
            future = self._unanswered.popleft().answer
            if future.done():  # its caller was cancelled
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _set_alarm(self, due: float) -> None:
        self._alarm = asyncio.get_running_loop().call_at(due, self._check_answers, due)

    def _check_answers(self, due: float) -> None:
        """Fail all commands if the server has answered none for `ANSWER_S`."""
        self._alarm = None
        if not self._unanswered:
            return
        now = asyncio.get_running_loop().time()
        deadline = max(self._unanswered[0].sent, self._answered) + ANSWER_S
        if now - due > _STALL_S:
            deadline = now + _STALL_S
        if deadline > now:
            self._set_alarm(deadline)
        else:
            self._fail(asyncio.TimeoutError())

    def _fail(self, error: Exception) -> asyncio.Task[None] | None:
        """Fail all commands, and end the reader, which is returned. The next command connects anew."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._link, self._losses = None, 0
        unanswered, self._unanswered = self._unanswered, deque()
        for command in unanswered:
            if not command.answer.done():
                command.answer.set_exception(error)
        return reader


async def _in_time(exchange: Awaitable[Any]) -> Any:
    """Return what an exchange with the server returns.

    Raises:
        asyncio.TimeoutError: if the server does not answer within `ANSWER_S`.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(exchange)
    try:
        while True:
            due = loop.time() + ANSWER_S
            await asyncio.wait([task], timeout=ANSWER_S)
            if task.done():
                return task.result()
            if loop.time() - due < _STALL_S:
                raise asyncio.TimeoutError
    finally:
        if not task.done():
            await end([task])
