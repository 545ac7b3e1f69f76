"""The lead: a lock in Redis with a heartbeat, of which there is one in a cluster.

Whoever holds it claims requests and decides placements. It is also what `/connected` tells: a key with a
time to live, that no writer's death leaves behind.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from ndif.stores.broker.port import BrokerError
from ndif.stores.redis.client import Redis, speaking
from ndif.stores.redis.script import Script
from ndif.tasks import end

logger = logging.getLogger(__name__)

_KEY = "dispatcher:leader"
_BEATS_PER_LIFE = 5

# A Redis that has lost the lock, with what else it had, is no reason to stop: nobody else leads.
_BEAT = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] or not holder then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 1
end
return 0
"""
_LEAVE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class Lead:
    """One process's part in it."""

    def __init__(self, client: Redis, life_s: float = 5.0) -> None:
        """`life_s`: how long after its last heartbeat a leader still counts as one."""
        self.lost = asyncio.Event()
        """Set once another leads after this one has."""
        self._client = client
        self._life_ms = int(life_s * 1000)
        self._beat_s = life_s / _BEATS_PER_LIFE
        self._name = uuid.uuid4().hex
        self._beat = Script(client, _BEAT)
        self._leave = Script(client, _LEAVE)
        self._beating: asyncio.Task[None] | None = None

    async def taken(self) -> None:
        """Return once this process leads."""
        while not await self._holds():  # noqa: ASYNC110 - others' doing
            await asyncio.sleep(self._beat_s)
        self._beating = asyncio.create_task(self._beat_forever(), name="heartbeat")

    async def leave(self) -> None:
        """Let another lead, at once."""
        if self._beating is not None:
            await end([self._beating])
        try:
            async with speaking():
                await self._leave([_KEY], [self._name])
        except BrokerError as error:
            logger.warning("the lead ends by itself: %s", error)

    async def _beat_forever(self) -> None:
        while await self._holds() is not False:  # noqa: ASYNC110 - others' doing
            await asyncio.sleep(self._beat_s)
        logger.error("another process leads")
        self.lost.set()

    async def _holds(self) -> bool | None:
        """Whether it is this process's now; None if that cannot be told."""
        try:
            async with speaking():
                return bool(await self._beat([_KEY], [self._name, self._life_ms]))
        except BrokerError as error:
            logger.warning("no heartbeat: %s", error)
            return None


async def somebody_leads(client: Redis) -> bool:
    """Whether some process leads.

    Raises:
        BrokerError: if that cannot be told.
    """
    async with speaking():
        return bool(await client.exists(_KEY))
