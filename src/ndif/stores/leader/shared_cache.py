"""Notes: small JSON values that the leader writes and every gateway reads, gone when it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from ndif.stores.redis.client import Redis, speaking

_FRESH_S = 0.5
"""How long a note that was read need not be read again: a burst of requests asks once."""


class Notes:
    """Notes in Redis, each under its name, as `status` or `env`."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._read: dict[str, tuple[float, Any]] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def write(self, name: str, value: Any, life_s: float) -> None:
        """Have `value` read under `name`, until another is written or its time is over.

        Raises:
            BrokerError: if it is not written.
        """
        content = json.dumps(value, separators=(",", ":"))
        async with speaking():
            await self._client.set(name, content, px=int(life_s * 1000))

    async def read(self, name: str) -> Any:
        """What was written last, at most half a second ago; None if there is nothing.

        Raises:
            BrokerError: if that cannot be told.
        """
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            now = asyncio.get_running_loop().time()
            read_at, value = self._read.get(name, (-_FRESH_S, None))
            if now - read_at < _FRESH_S:
                return value
            async with speaking():
                content = await self._client.get(name)
            value = None if content is None else json.loads(content)
            self._read[name] = now, value
            return value
