"""The broker's Lua scripts; Redis runs each as one atomic step.

With its memory full, Redis refuses a script whose first write needs memory, but not one that frees memory
first. So a submission is refused as a whole, and a release begins with its deletions.
"""

from __future__ import annotations

from typing import Any

from ndif.schema.request import Request
from ndif.stores.redis import Redis

QUEUE = "queue"
GROUP = "dispatchers"
ENDS = "ends"
"""The channel on which the end of each request is published."""
HELD = "queue:bytes"
"""Key of the bytes of all unfinished requests' payloads."""
JOBS = "queue:jobs"
"""Hash of the numbers of unfinished requests, by API key and by model."""
UNCONFIRMED_S = 300
_ENDED_S = 300
"""Seconds for which a request is known to have had its terminal response."""
UPLOAD_S = 3600
MANY_OF_KEY, MANY_OF_MODEL = -1, -2

# Returns the held bytes if this request would exceed the limit, MANY_OF_KEY or MANY_OF_MODEL if its API key
# or its model has its maximum of unfinished requests, else nothing. A client that loses its connection
# before the answer sends the script again, and finds the request stored. A request that was withdrawn
# meanwhile is not stored again.
SUBMIT = """
if redis.call('EXISTS', KEYS[1], KEYS[4]) > 0 then return false end
local held = tonumber(redis.call('GET', KEYS[3]) or '0')
if held > 0 and held + ARGV[3] > tonumber(ARGV[4]) then return held end
local most, counted = {ARGV[7], ARGV[8]}, {ARGV[9], ARGV[10]}
for i = 1, 2 do
  if most[i] ~= '' and
    tonumber(redis.call('HGET', KEYS[5], counted[i]) or '0') >= tonumber(most[i])
  then return -i end
end
redis.call(
  'HSET', KEYS[1], 'subscription', ARGV[2], 'bytes', ARGV[3], 'key', ARGV[9], 'model', ARGV[10]
)
if ARGV[11] then redis.call('HSET', KEYS[1], 'payload', ARGV[11]) end
redis.call('INCRBY', KEYS[3], ARGV[3])
for _, field in ipairs(counted) do
  if field ~= '' then redis.call('HINCRBY', KEYS[5], field, 1) end
end
local entry = redis.call('XADD', KEYS[2], '*', 'request', ARGV[1])
redis.call('HSET', KEYS[1], 'entry', entry)
if ARGV[5] ~= '' then redis.call('PUBLISH', ARGV[5], ARGV[6]) end
"""

# Decrements the numbers of unfinished requests of an API key and of a model.
_UNCOUNT = """
local function uncount(jobs, counted)
  for _, field in ipairs(counted) do
    if field and field ~= '' and redis.call('HINCRBY', jobs, field, -1) <= 0 then
      redis.call('HDEL', jobs, field)
    end
  end
end
"""

# Sets `elsewhere` if the payload is in the object store, where the caller deletes it.
RELEASE = (
    _UNCOUNT
    + """
local bytes, key, model = unpack(redis.call('HMGET', KEYS[1], 'bytes', 'key', 'model'))
local elsewhere = bytes and redis.call('HEXISTS', KEYS[1], 'payload') == 0
redis.call('DEL', KEYS[1], KEYS[2])
if ARGV[2] ~= '' then
  redis.call('XACK', KEYS[3], ARGV[1], ARGV[2])
  redis.call('XDEL', KEYS[3], ARGV[2])
end
if bytes then redis.call('DECRBY', KEYS[4], bytes) end
uncount(KEYS[5], {key, model})
"""
)

# A process that has claimed the request finds no payload. The mark refuses a late submission.
WITHDRAW = (
    _UNCOUNT
    + """
local bytes, entry, key, model =
  unpack(redis.call('HMGET', KEYS[1], 'bytes', 'entry', 'key', 'model'))
redis.call('DEL', KEYS[1])
if entry then
  redis.call('XACK', KEYS[2], ARGV[1], entry)
  redis.call('XDEL', KEYS[2], entry)
end
if bytes then redis.call('DECRBY', KEYS[3], bytes) end
uncount(KEYS[5], {key, model})
redis.pcall('SET', KEYS[4], 1, 'EX', ARGV[2])
"""
)

# A leader that loses a replica reads the mark that a request has ended. Without memory it is left out.
COMPLETE = (
    RELEASE
    + """
redis.pcall('SET', KEYS[6], 1, 'EX', ARGV[3])
redis.call('PUBLISH', ARGV[4], ARGV[5])
"""
)

# The list is for a gateway that is disconnected now; without memory, only a connected one gets the update.
# A request has one end, even if two processes both believe that they lead.
PUBLISH_LAST = (
    "local ended = redis.call('EXISTS', KEYS[6])\n"
    + COMPLETE
    + """
if ended == 1 then return {1, elsewhere} end
local heard = redis.call('PUBLISH', ARGV[6], ARGV[7])
if type(redis.pcall('RPUSH', KEYS[7], ARGV[7])) == 'number' then
  redis.call('EXPIRE', KEYS[7], ARGV[8])
end
return {heard, elsewhere}
"""
)

# A payload in Redis is sent with its request; a replica reads any other from the object store.
HAND_OVER = """
if ARGV[3] ~= '' and redis.call('PUBLISH', ARGV[3], ARGV[4]) == 0 then return false end
return redis.call('PUBLISH', ARGV[1], ARGV[2] .. (redis.call('HGET', KEYS[1], 'payload') or ''))
"""

# A request that was released meanwhile is not stored again.
NOTE_ATTEMPTS = """
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'attempts', ARGV[1]) end
"""

# Removes an entry from the queue, but not the request that it names.
DISCARD = """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
"""

# Only a hybrid job's own client uploads, one upload at a time.
UPLOAD = """
if redis.call('HGET', KEYS[1], 'subscription') == ARGV[1] and redis.call('LLEN', KEYS[2]) == 0 then
  redis.call('RPUSH', KEYS[2], ARGV[2])
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
"""


def record_of(request_id: str) -> str:
    """Return the key of an unfinished request's hash."""
    return f"request:{request_id}"


def uploads_of(request_id: str) -> str:
    """Return the key of the list of a hybrid job's uploads."""
    return f"uploads:{request_id}"


def ended_of(request_id: str) -> str:
    """Return the key that marks a request as ended."""
    return f"ended:{request_id}"


def keys_of(request: Request) -> list[str]:
    """Return the keys that the release of a request deletes or updates."""
    return [
        record_of(request.id),
        uploads_of(request.id),
        QUEUE,
        HELD,
        JOBS,
        ended_of(request.id),
    ]


def submission_limits(request: Request, *most: int | None) -> list[Any]:
    """Return the arguments of `SUBMIT` for the limits on unfinished requests."""
    key = f"key {request.key}" if request.key else ""
    return [*("" if limit is None else limit for limit in most), key, f"model {request.model}"]


def submission_keys_of(request_id: str) -> list[str]:
    """Return the keys that the submission of a request and its withdrawal update."""
    return [record_of(request_id), QUEUE, HELD, ended_of(request_id), JOBS]


def withdrawal_arguments() -> list[Any]:
    """Return the arguments of `WITHDRAW`."""
    return [GROUP, _ENDED_S]


def end_arguments(request: Request, news: bytes) -> list[Any]:
    """Return the arguments of `COMPLETE`, also the first of `PUBLISH_LAST`; `news` is published."""
    return [GROUP, request.receipt, _ENDED_S, ENDS, news]


class Scripts:
    """The scripts of a broker, as its client calls them."""

    def __init__(self, client: Redis) -> None:
        register = client.register_script
        self.submit = register(SUBMIT)
        self.withdraw = register(WITHDRAW)
        self.release = register(f"{RELEASE} return elsewhere")
        self.complete = register(f"{COMPLETE} return elsewhere")
        self.publish_last = register(PUBLISH_LAST)
        self.hand_over = register(HAND_OVER)
        """Send a job to a replica."""
        self.note_attempts = register(NOTE_ATTEMPTS)
        self.discard = register(DISCARD)
        self.upload = register(UPLOAD)
