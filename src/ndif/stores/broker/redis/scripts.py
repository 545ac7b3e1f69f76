"""What Redis does in one step, each step at once and whole: scripts that it runs (Redis 6.2 or newer).

A Redis whose memory is full refuses a script's first write and none after it: who is to be accepted is
refused whole, who is to be let go of lets go first.
"""

from __future__ import annotations

from typing import Any

from ndif.schema.request import Request
from ndif.stores.redis.client import Redis
from ndif.stores.redis.script import Script

QUEUE = "queue"
GROUP = "dispatchers"
ENDS = "ends"
"""The channel on which it is told how each request ended."""
_HELD = "queue:bytes"
"""What the payloads of all requests have together that are not done."""
_MAILBOX_S = 300
_ENDED_S = 300
"""How long it is known of a request that it has had its last response."""
_UPLOAD_S = 3600

# How much is held already, where this one would be too much with it; else nothing. Whoever lost the
# connection before the answer came sends it again: then it is there.
_SUBMIT = """
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
local held = tonumber(redis.call('GET', KEYS[3]) or '0')
if held > 0 and held + ARGV[3] > tonumber(ARGV[4]) then return held end
redis.call('HSET', KEYS[1], 'session', ARGV[2], 'bytes', ARGV[3])
if ARGV[5] then redis.call('HSET', KEYS[1], 'payload', ARGV[5]) end
redis.call('INCRBY', KEYS[3], ARGV[3])
redis.call('XADD', KEYS[2], '*', 'request', ARGV[1])
"""

# Whether its payload was kept elsewhere, and is to be deleted there.
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

# Without room for the note it is done without: nobody asks but whoever hears that a replica was lost.
_CONCLUDE = (
    _RELEASE
    + """
redis.pcall('SET', KEYS[5], 1, 'EX', ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[5])
"""
)

# The mailbox is for a gateway that does not hear now: without room for it, who hears has it.
_PUBLISH_LAST = (
    _CONCLUDE
    + """
local heard = redis.call('PUBLISH', ARGV[6], ARGV[7])
if type(redis.pcall('RPUSH', KEYS[6], ARGV[7])) == 'number' then
  redis.call('EXPIRE', KEYS[6], ARGV[8])
end
return {heard, elsewhere}
"""
)

# The replica has with its request what rides along with that in Redis; what does not, it asks for.
_HAND_OVER = """
if ARGV[3] ~= '' and redis.call('PUBLISH', ARGV[3], ARGV[4]) == 0 then return false end
return redis.call('PUBLISH', ARGV[1], ARGV[2] .. (redis.call('HGET', KEYS[1], 'payload') or ''))
"""

# A hybrid job's client hands over what it was asked for, one answer at a time, and nobody else does.
_UPLOAD = """
if redis.call('HGET', KEYS[1], 'session') == ARGV[1] and redis.call('LLEN', KEYS[2]) == 0 then
  redis.call('RPUSH', KEYS[2], ARGV[2])
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
"""


class Scripts:
    """Each as a coroutine."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._submit = Script(client, _SUBMIT)
        self._release = Script(client, f"{_RELEASE} return elsewhere")
        self._publish_last = Script(client, _PUBLISH_LAST)
        self._conclude = Script(client, f"{_CONCLUDE} return elsewhere")
        self._hand_over = Script(client, _HAND_OVER)
        self._upload = Script(client, _UPLOAD)

    async def submit(
        self,
        request_id: str,
        entry: bytes,
        session: str,
        size: int,
        limit: int,
        payload: bytes | None,
    ) -> int | None:
        """Store a request and put it in the queue; what is held already, where that is too much."""
        arguments: list[Any] = [
            entry,
            session,
            size,
            limit,
            *([] if payload is None else [payload]),
        ]
        keys = [record_of(request_id), QUEUE, _HELD]
        held: int | None = await self._submit(keys, arguments)
        return held

    async def held(self) -> int:
        """What the payloads of all requests have together that are not done."""
        return int(await self._client.get(_HELD) or 0)

    async def release(self, request: Request) -> bool:
        """Forget a request; whether its payload was kept elsewhere."""
        return bool(await self._release(_keys(request), [GROUP, request.receipt]))

    async def conclude(self, request: Request, end: bytes) -> bool:
        """The same with a request that has had its last response, and tell `end` of it."""
        keys, arguments = _keys(request), _arguments(request, end)
        return bool(await self._conclude(keys, arguments))

    async def publish_last(
        self, request: Request, end: bytes, channel: str, mailbox: str, update: bytes
    ) -> tuple[int, bool]:
        """The same with its last response, which its session must not miss; and how many heard that."""
        arguments = [*_arguments(request, end), channel, update, _MAILBOX_S]
        heard, elsewhere = await self._publish_last([*_keys(request), mailbox], arguments)
        return int(heard), bool(elsewhere)

    async def hand_over(
        self, request_id: str, lane: str, head: bytes, channel: str, announcement: bytes
    ) -> int | None:
        """Publish `announcement` on a channel and a request after `head` on a lane, with its payload.

        How many heard the request; None if nobody heard the announcement, and it was not handed over.
        """
        heard: int | None = await self._hand_over(
            [record_of(request_id)], [lane, head, channel, announcement]
        )
        return heard

    async def has_ended(self, request_id: str) -> bool:
        """Whether a request has had its last response, as far as it is known still."""
        return bool(await self._client.exists(_end_of(request_id)))

    async def upload(self, request_id: str, session: str, content: bytes) -> None:
        """Keep what the client of a hybrid job sent for it."""
        keys = [record_of(request_id), uploads_of(request_id)]
        await self._upload(keys, [session, content, _UPLOAD_S])


def record_of(request_id: str) -> str:
    """The hash of a request that is not done."""
    return f"request:{request_id}"


def uploads_of(request_id: str) -> str:
    """The list of what the client of a hybrid job has sent."""
    return f"uploads:{request_id}"


def _end_of(request_id: str) -> str:
    return f"ended:{request_id}"


def _keys(request: Request) -> list[str]:
    """What there is of a request, and is to go."""
    return [record_of(request.id), uploads_of(request.id), QUEUE, _HELD, _end_of(request.id)]


def _arguments(request: Request, end: bytes) -> list[Any]:
    return [GROUP, request.receipt, _ENDED_S, ENDS, end]
