"""Small JSON values that the leader writes and every gateway reads; they expire when the leader dies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ndif.stores.redis.client import Redis, broker_errors

_FRESH_S = 0.5
"""Seconds for which a value is not read again, so that a burst of requests reads it once."""


class SharedCache:
    """Values in Redis by name, such as `status` or `env`."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._read: dict[str, tuple[float, Any]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def write(self, name: str, value: Any, life_s: float) -> None:
        """Store `value` under `name` for `life_s` seconds.

        Raises:
            BrokerError: if the value is not written.
        """
        content = json.dumps(value, separators=(",", ":"))
        async with broker_errors():
            await self._client.set(name, content, px=int(life_s * 1000))

    async def read(self, name: str) -> Any:
        """Return the value of `name`, at most half a second old; None if there is none.

        Raises:
            BrokerError: if Redis does not answer.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            now = asyncio.get_running_loop().time()
            read_at, value = self._read.get(name, (-_FRESH_S, None))
            if now - read_at < _FRESH_S:
                return value
            async with broker_errors():
                content = await self._client.get(name)
            value = None if content is None else json.loads(content)
            self._read[name] = now, value
            return value
