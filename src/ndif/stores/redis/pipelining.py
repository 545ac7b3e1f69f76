"""The client library's client, whose commands go through pipelines."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from ndif.stores.redis.link import packed
from ndif.stores.redis.pipeline import Pipeline

_BLOCKING = frozenset({"BLPOP", "XREAD", "XREADGROUP"})
"""What waits in Redis has a connection to itself; it waits for less than `ANSWER_S`."""
_LARGE = 1 << 16
"""Nobody waits for the bytes of a command that has more of them than this."""


class PipeliningRedis(Redis):
    """Sends its commands on one connection, in the order in which they are asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._shared = Pipeline(self)
        self._apart: set[Pipeline] = set()
        """What one command at a time is sent on."""
        self._idle: list[Pipeline] = []
        """Those of them on which nothing is asked."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """See `Redis.execute_command`."""
        content = packed(*args)
        if args[0] in _BLOCKING or len(content) > _LARGE:
            said = await self._ask_apart(content)
        else:
            said = await self._shared.ask(content)
        options.pop("keys", None)  # a note for the library's cache
        read = self.response_callbacks.get(args[0])
        return said if read is None else read(said, **options)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """See `Redis.aclose`."""
        self._idle.clear()
        for pipeline in (self._shared, *self._apart):
            await pipeline.close()
        self._apart.clear()
        await super().aclose(close_connection_pool)

    async def _ask_apart(self, content: bytes) -> Any:
        if self._idle:
            pipeline = self._idle.pop()
        else:
            pipeline = Pipeline(self)
            self._apart.add(pipeline)
        try:
            said = await pipeline.ask(content)
        except BaseException:
            # What is still to come on it nobody waits for.
            self._apart.discard(pipeline)
            await pipeline.close()
            raise
        self._idle.append(pipeline)
        return said
