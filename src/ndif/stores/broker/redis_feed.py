"""The connection on which a process hears what is published.

It is the client library's connection without its `PubSub`: that comes back by itself from a connection
that was lost, without a word about what was missed, and takes as long for a message as all else here does.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

from ndif.stores.redis.batches import ANSWER_S
from ndif.stores.redis.client import Redis, speaking


class Feed:
    """Open until it is lost or closed."""

    def __init__(self, client: Redis, connection: Any) -> None:
        self._pool = client.connection_pool
        self._connection = connection

    @classmethod
    async def open(cls, client: Redis, *names: str) -> Feed:
        """One that is subscribed to these channels.

        Raises:
            BrokerError: if the server does not answer.
        """
        pool: Any = client.connection_pool
        async with speaking(ANSWER_S):
            feed = cls(client, await pool.get_connection())
        try:
            await feed.say("SUBSCRIBE", *names)
        except BaseException:
            await feed.close()
            raise
        return feed

    async def say(self, command: str, *names: str) -> None:
        """SUBSCRIBE or UNSUBSCRIBE, which the server confirms among what is read.

        Raises:
            BrokerError: if the connection is lost.
        """
        async with speaking(ANSWER_S):
            await self._connection.send_command(command, *names, check_health=False)

    async def read(self) -> tuple[str, str, Any]:
        """The next message, or confirmation: its kind, the channel's name, and what was published.

        Raises:
            BrokerError: if the connection is lost.
        """
        async with speaking():
            kind, name, content = await self._connection.read_response(
                timeout=math.inf, disconnect_on_error=False, push_request=True
            )
        return kind.decode(), name.decode(), content

    async def close(self) -> None:
        """Hear no more."""
        with contextlib.suppress(Exception):
            await self._connection.disconnect()
        await self._pool.release(self._connection)
