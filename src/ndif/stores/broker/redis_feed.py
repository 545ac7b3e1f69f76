"""The connection on which a process hears what is published.

The client library's own `PubSub` comes back by itself from a connection that was lost, without a word
about what was missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ndif.stores.broker.port import BrokerError
from ndif.stores.redis.client import Redis, speaking
from ndif.stores.redis.link import Link, packed

Hear = Callable[[str, str, Any], None]
"""What is given each message, or confirmation: its kind, the channel's name, and what was published."""


class Feed:
    """Open until it is lost or closed."""

    def __init__(self, hear: Hear) -> None:
        self._hear_message = hear
        self._link: Link
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, client: Redis, hear: Hear, *names: str) -> Feed:
        """One that is subscribed to these channels.

        Raises:
            BrokerError: if the server does not answer.
        """
        feed = cls(hear)
        async with speaking():
            feed._link = await Link.open(client, feed._hear, feed._lose)
        feed.say("SUBSCRIBE", *names)
        return feed

    def say(self, command: str, *names: str) -> None:
        """SUBSCRIBE or UNSUBSCRIBE, which the server confirms among what is heard.

        Raises:
            BrokerError: if the connection is lost.
        """
        if self._over.done():
            raise BrokerError("its broker does not answer")
        self._link.write(packed(command, *names))

    async def over(self) -> str:
        """Why nothing is heard any more, once that is so."""
        return await asyncio.shield(self._over)

    def close(self) -> None:
        """Hear no more."""
        self._link.close()
        self._lose("closed")

    def _hear(self, said: Any) -> None:
        if isinstance(said, Exception):
            raise said
        kind, name, content = said
        self._hear_message(kind.decode(), name.decode(), content)

    def _lose(self, why: Exception | str) -> None:
        if not self._over.done():
            self._over.set_result(str(why))
