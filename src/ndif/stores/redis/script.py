"""A script that Redis runs: in one step, at once and whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError


class Script:
    """In Lua. A server that was restarted is sent it again."""

    def __init__(self, client: Redis, source: str) -> None:
        self._client: Any = client
        self._source = source
        self._name = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """What it returns.

        Raises:
            RedisError, OSError, asyncio.TimeoutError: if it fails, or the server does not answer.
        """
        rest = len(keys), *keys, *arguments
        try:
            return await self._client.execute_command("EVALSHA", self._name, *rest)
        except NoScriptError:
            return await self._client.execute_command("EVAL", self._source, *rest)
