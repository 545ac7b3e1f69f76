"""A connection to Redis of which everything is heard as it comes.

The client library opens it, with all that its URL asks for (TLS, a password, a database), and then lets
go of it: what reads and writes here is the event loop, which no task has to be woken for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, InvalidResponse, RedisError

from ndif.tasks import timeout

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""A Redis that does not answer for so long counts as away: nobody is to hang on it."""

_NOTHING = object()


def packed(*command: Any) -> bytes:
    """A command in the form in which it is sent; its first word may be several.

    Raises:
        DataError: if there is anything in it that is neither bytes, nor text, nor a number.
    """
    words = tuple(command[0].split()) + command[1:]
    try:
        content: bytes = hiredis.pack_command(words)
    except TypeError as error:
        raise DataError(str(error)) from error
    return content


class Link(asyncio.Protocol):
    """Open until it is lost or closed."""

    def __init__(
        self,
        connection: Any,
        hear: Callable[[Any], None],
        lost: Callable[[Exception], None],
    ) -> None:
        # The library has no public way to let go of a connection: these names are its own.
        self._connection = connection
        self._transport: asyncio.Transport = connection._writer.transport
        self._opener = self._transport.get_protocol()
        self._hear: Callable[[Any], None] | None = hear
        self._lost = lost
        self._unsent: list[bytes] = []
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=_NOTHING,
        )
        self._transport.set_protocol(self)

    @classmethod
    async def open(
        cls, client: Redis, hear: Callable[[Any], None], lost: Callable[[Exception], None]
    ) -> Link:
        """A new one: `hear` is given what comes, an error as an exception; `lost` why it ended.

        Raises:
            RedisError, OSError, asyncio.TimeoutError: if the server does not answer.
        """
        pool: Any = client.connection_pool
        connection = pool.make_connection()
        try:
            async with timeout(ANSWER_S):
                await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return cls(connection, hear, lost)

    def write(self, content: bytes) -> None:
        """Send it, with what else is written in this turn of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(content)

    def _send(self) -> None:
        content = b"".join(self._unsent)
        self._unsent.clear()
        if self._hear is not None:
            self._transport.write(content)

    def close(self) -> None:
        """Hear nothing more, not of its end either."""
        self._hear = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        try:
            self._reader.feed(data)
            while self._hear is not None and (said := self._reader.gets()) is not _NOTHING:
                self._hear(said)
        except RedisError as error:
            self._end(error)
        except Exception as error:
            # A defect of ours is none of those who ask.
            logger.exception("what Redis says is not understood")
            self._end(RedisError(f"{type(error).__name__}: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        # Whoever opened it waits for that when it is closed, and must not take it for open.
        self._opener.connection_lost(exc)
        self._connection._writer = self._connection._reader = None
        self._end(exc or RedisConnectionError("the server closed the connection"))

    def _end(self, error: Exception) -> None:
        if self._hear is not None:
            self.close()
            self._lost(error)
