"""The leader's lock: one key in Redis with a time to live, renewed by a heartbeat.

The process that holds the lock claims requests and decides placements. `/connected` reports the same key,
which expires if its holder dies.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from ndif.stores.broker.port import BrokerError
from ndif.stores.redis.client import Redis, broker_errors
from ndif.tasks import end

logger = logging.getLogger(__name__)

_KEY = "dispatcher:leader"
_BEATS_PER_LIFE = 5

# A leader whose lock was lost with Redis' data takes it again: no other process leads.
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


class LeaderLock:
    """One process's candidacy for the leader's lock.

    Owns the heartbeat once it holds the lock. It claims nothing and places nothing.
    """

    def __init__(self, client: Redis, life_s: float = 5.0) -> None:
        """Create a candidate.

        Args:
            client: The Redis that holds the lock.
            life_s: Seconds after its last heartbeat for which a process still leads.
        """
        self.lost = asyncio.Event()
        """Set when another process took the lock from this one."""
        self._client = client
        self._life_ms = int(life_s * 1000)
        self._beat_s = life_s / _BEATS_PER_LIFE
        self._name = uuid.uuid4().hex
        self._beat = client.register_script(_BEAT)
        self._leave = client.register_script(_LEAVE)
        self._beating: asyncio.Task[None] | None = None

    async def taken(self) -> None:
        """Wait until this process holds the lock."""
        while not await self._holds():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(self._beat_s)
        self._beating = asyncio.create_task(self._beat_forever(), name="heartbeat")

    async def leave(self) -> None:
        """Release the lock, so that another process leads at once."""
        if self._beating is not None:
            await end([self._beating])
        try:
            async with broker_errors():
                await self._leave([_KEY], [self._name])
        except BrokerError as error:
            logger.warning("the leader's lock is not released and expires: %s", error)

    async def _beat_forever(self) -> None:
        while await self._holds() is not False:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(self._beat_s)
        logger.error("another process leads")
        self.lost.set()

    async def _holds(self) -> bool | None:
        """Take or renew the lock, and return True if that succeeds; None if Redis does not answer."""
        try:
            async with broker_errors():
                return bool(await self._beat([_KEY], [self._name, self._life_ms]))
        except BrokerError as error:
            logger.warning("no heartbeat: %s", error)
            return None


async def somebody_leads(client: Redis) -> bool:
    """Return True if some process leads.

    Raises:
        BrokerError: if Redis does not answer.
    """
    async with broker_errors():
        return bool(await client.exists(_KEY))
