"""The broker's Lua scripts, each of which Redis runs as one atomic step.

A Redis whose memory is full refuses a script whose first write needs memory, and none that frees memory
first: a submission is refused as a whole, and a release begins with its deletions.
"""

from __future__ import annotations

from typing import Any

from ndif.schema.request import Request
from ndif.stores.redis.client import Redis

QUEUE = "queue"
GROUP = "dispatchers"
ENDS = "ends"
"""The channel on which the end of each request is published."""
_HELD = "queue:bytes"
"""Key of the bytes of all unfinished requests' payloads."""
_UNCONFIRMED_S = 300
_ENDED_S = 300
"""Seconds for which a request is known to have had its terminal response."""
_UPLOAD_S = 3600

# Returns the bytes that are held already if this request would exceed the limit, else nothing. A client
# that lost its connection before the answer sends the script again, and finds the request stored.
_SUBMIT = """
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
local held = tonumber(redis.call('GET', KEYS[3]) or '0')
if held > 0 and held + ARGV[3] > tonumber(ARGV[4]) then return held end
redis.call('HSET', KEYS[1], 'subscription', ARGV[2], 'bytes', ARGV[3])
if ARGV[5] then redis.call('HSET', KEYS[1], 'payload', ARGV[5]) end
redis.call('INCRBY', KEYS[3], ARGV[3])
redis.call('XADD', KEYS[2], '*', 'request', ARGV[1])
"""

# Sets `elsewhere` if the payload is in the object store, where the caller deletes it.
_RELEASE = """
local bytes = redis.call('HGET', KEYS[1], 'bytes')
local elsewhere = bytes and redis.call('HEXISTS', KEYS[1], 'payload') == 0
redis.call('DEL', KEYS[1], KEYS[2])
if ARGV[2] ~= '' then
  redis.call('XACK', KEYS[3], ARGV[1], ARGV[2])
  redis.call('XDEL', KEYS[3], ARGV[2])
end
if bytes then redis.call('DECRBY', KEYS[4], bytes) end
"""

# The mark that a request has ended is read after the loss of a replica. Without memory, it is left out.
_CONCLUDE = (
    _RELEASE
    + """
redis.pcall('SET', KEYS[5], 1, 'EX', ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[5])
"""
)

# The list is for a gateway that is not connected now: without memory, only a connected one has the update.
# A request has one end, even where two leaders each take themselves for the only one.
_PUBLISH_LAST = (
    "local ended = redis.call('EXISTS', KEYS[5])\n"
    + _CONCLUDE
    + """
if ended == 1 then return {1, elsewhere} end
local heard = redis.call('PUBLISH', ARGV[6], ARGV[7])
if type(redis.pcall('RPUSH', KEYS[6], ARGV[7])) == 'number' then
  redis.call('EXPIRE', KEYS[6], ARGV[8])
end
return {heard, elsewhere}
"""
)

# A payload that Redis stores goes along with its request; a replica reads any other from the object store.
_HAND_OVER = """
if ARGV[3] ~= '' and redis.call('PUBLISH', ARGV[3], ARGV[4]) == 0 then return false end
return redis.call('PUBLISH', ARGV[1], ARGV[2] .. (redis.call('HGET', KEYS[1], 'payload') or ''))
"""

# Only a hybrid job's own client uploads, one upload at a time.
_UPLOAD = """
if redis.call('HGET', KEYS[1], 'subscription') == ARGV[1] and redis.call('LLEN', KEYS[2]) == 0 then
  redis.call('RPUSH', KEYS[2], ARGV[2])
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
"""


class Scripts:
    """The scripts as coroutines of one client."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._submit = client.register_script(_SUBMIT)
        self._release = client.register_script(f"{_RELEASE} return elsewhere")
        self._publish_last = client.register_script(_PUBLISH_LAST)
        self._conclude = client.register_script(f"{_CONCLUDE} return elsewhere")
        self._hand_over = client.register_script(_HAND_OVER)
        self._upload = client.register_script(_UPLOAD)

    async def submit(
        self,
        request_id: str,
        entry: bytes,
        subscription_id: str,
        size: int,
        limit: int,
        payload: bytes | None,
    ) -> int | None:
        """Store a request in the queue, or return the bytes held if it would exceed `limit`."""
        arguments: list[Any] = [
            entry,
            subscription_id,
            size,
            limit,
            *([] if payload is None else [payload]),
        ]
        keys = [record_of(request_id), QUEUE, _HELD]
        held: int | None = await self._submit(keys, arguments)
        return held

    async def held(self) -> int:
        """Return the bytes of all unfinished requests' payloads."""
        return int(await self._client.get(_HELD) or 0)

    async def release(self, request: Request) -> bool:
        """Delete a request, and return True if its payload is in the object store."""
        return bool(await self._release(_keys(request), [GROUP, request.receipt]))

    async def conclude(self, request: Request, end: bytes) -> bool:
        """Do as `release` does for a request that has ended, and publish `end`."""
        keys, arguments = _keys(request), _arguments(request, end)
        return bool(await self._conclude(keys, arguments))

    async def publish_last(
        self, request: Request, end: bytes, channel: str, unconfirmed: str, update: bytes
    ) -> tuple[int, bool]:
        """Do as `conclude` does, publish the terminal `update`, and store it until its gateway confirms it.

        Returns:
            How many received the update, and True if the payload is in the object store.
        """
        arguments = [*_arguments(request, end), channel, update, _UNCONFIRMED_S]
        received, elsewhere = await self._publish_last([*_keys(request), unconfirmed], arguments)
        return int(received), bool(elsewhere)

    async def hand_over(
        self, request_id: str, jobs: str, head: bytes, channel: str, announcement: bytes
    ) -> int | None:
        """Publish `announcement` on `channel`, then `head` and the request's payload on the channel `jobs`.

        Returns:
            How many received the request. None if nobody received the announcement; then it was not sent.
        """
        received: int | None = await self._hand_over(
            [record_of(request_id)], [jobs, head, channel, announcement]
        )
        return received

    async def has_ended(self, request_id: str) -> bool:
        """Return True if a request has had its terminal response within the last `_ENDED_S`."""
        return bool(await self._client.exists(_end_of(request_id)))

    async def upload(self, request_id: str, subscription_id: str, content: bytes) -> None:
        """Store an upload for a hybrid job."""
        keys = [record_of(request_id), uploads_of(request_id)]
        await self._upload(keys, [subscription_id, content, _UPLOAD_S])


def record_of(request_id: str) -> str:
    """Return the key of an unfinished request's hash."""
    return f"request:{request_id}"


def uploads_of(request_id: str) -> str:
    """Return the key of the list of a hybrid job's uploads."""
    return f"uploads:{request_id}"


def _end_of(request_id: str) -> str:
    return f"ended:{request_id}"


def _keys(request: Request) -> list[str]:
    """Return the keys that the release of a request deletes or updates."""
    return [record_of(request.id), uploads_of(request.id), QUEUE, _HELD, _end_of(request.id)]


def _arguments(request: Request, end: bytes) -> list[Any]:
    return [GROUP, request.receipt, _ENDED_S, ENDS, end]
