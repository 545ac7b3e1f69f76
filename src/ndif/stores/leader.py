"""The leader of a server's processes: its lock, calls to it, and values that it shares with gateways.

The lock is one key in Redis with a time to live, renewed by a heartbeat. The process that holds it claims
requests and decides placements. `/connected` reports the same key, which expires if its holder dies.

Calls, answers and shared values are signed. An attacker who can only write to Redis can take the lock and
so stop the server, but cannot operate it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from ndif.runtime.typed_json import from_json, to_json
from ndif.schema.deployment import OperationError
from ndif.stores.broker.port import BrokerError
from ndif.stores.broker.signing import PROTOCOL, SignatureError, Signer, unverified
from ndif.stores.redis import ANSWER_S, Redis, broker_errors
from ndif.tasks import end, start, within

logger = logging.getLogger(__name__)

_KEY = "dispatcher:leader"
_LIFE_S = 5.0
"""Seconds for which a process still leads after its last heartbeat."""
_BEAT_S = 1.0

_STREAM = "dispatcher:events"
_MAX_EVENTS = 1000
_BLOCK_S = 2
_RETRY_S = 2.0
_ANSWER_TTL_S = 60
_STALE_S = 10.0
"""Seconds without a leader after which a call fails; the leader skips older events."""

_FRESH_S = 0.5
"""Seconds for which a shared value is not read again, so that a burst of requests reads it once."""

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
_CLOCK_SKEW_S = 60.0
"""Tolerated difference of the nodes' clocks, in seconds."""
_EVENT_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CLOCKS_DIFFER = (
    "The server cannot be asked: the clocks of its nodes differ by {:.0f} s. Set them, as by NTP, and ask "
    "again."
)
_SECRETS_DIFFER = (
    "the leader has another NDIF_CLUSTER_SECRET than this process; all nodes of a server need the same "
    "secret"
)
_NO_LEADER = (
    "The server has no leader now; another process takes over within seconds. Try again then."
)

T = TypeVar("T")
Handler = Callable[[str, Mapping[str, Any]], Awaitable[bytes]]
"""Carries out an event, given its name and arguments, and returns the JSON of the answer.

Raises:
    OperationError: If it cannot be carried out.
"""


class LeaderLock:
    """One process's candidacy for the leader's lock.

    Owns the heartbeat once it holds the lock. It claims no requests and places no replicas.
    """

    def __init__(self, client: Redis) -> None:
        self.lost = asyncio.Event()
        """Set when another process took the lock from this one."""
        self._name = f"{PROTOCOL} {uuid.uuid4().hex}"
        self._beat = client.register_script(_BEAT)
        self._leave = client.register_script(_LEAVE)
        self._beating: asyncio.Task[None] | None = None

    async def taken(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until this process holds the lock; call `waiting` at each check while another holds it."""
        while not (holds := await self._holds()):
            if holds is False:
                waiting()
            await asyncio.sleep(_BEAT_S)
        self._beating = asyncio.create_task(self._beat_forever(), name="heartbeat")

    async def leave(self) -> None:
        """Release the lock, so that another process leads at once."""
        if self._beating is not None:
            await end([self._beating])
        try:
            await self._leave([_KEY], [self._name])
        except BrokerError as error:
            logger.warning("the leader's lock is not released and expires: %s", error)

    async def _beat_forever(self) -> None:
        while await self._holds() is not False:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(_BEAT_S)
        logger.error("another process leads")
        self.lost.set()

    async def _holds(self) -> bool | None:
        """Take or renew the lock, and return True if that succeeds; None if Redis does not answer."""
        try:
            return bool(await self._beat([_KEY], [self._name, int(_LIFE_S * 1000)]))
        except BrokerError as error:
            logger.warning("no heartbeat: %s", error)
            return None


async def has_leader(client: Redis) -> bool:
    """Return True if there is a leader with this process's protocol."""
    return _has_protocol(await client.get(_KEY))


def _has_protocol(name: Any) -> bool:
    """Return True if a leader's name, as Redis returns it, has this process's protocol."""
    return name is not None and bytes(name).partition(b" ")[0] == str(PROTOCOL).encode()


def obstacle(client: Any, secrets: Sequence[str], value: str) -> str | None:
    """Return a clause on why this process cannot work with the leader; None if it can.

    `client` is a synchronous client of Redis. The shared value named `value` has the leader's signature.
    """
    name = client.get(_KEY)
    if name is None:
        return None
    if not _has_protocol(name):
        return (
            "is of another version than this one, and the two do not work together: stop it first "
            "(`ndif stop` on its machine), or install the same version everywhere"
        )
    content = client.get(value)
    if content is None:
        return None
    try:
        Signer(secrets).verify(_shared(value), content)
    except SignatureError:
        return "has another NDIF_CLUSTER_SECRET than this one: set the same on all machines"
    return None


class _SharedValue(msgspec.Struct):
    until: float
    """Unix time of its expiry, since Redis is not trusted to expire it."""
    value: msgspec.Raw


class SharedCache:
    """Small typed values of the leader by name, such as `status`; they expire after it dies."""

    def __init__(self, client: Redis, signer: Signer) -> None:
        self._client = client
        self._signer = signer
        self._cache: dict[str, tuple[float, Any]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def write(self, name: str, value: Any, life_s: float) -> None:
        """Store `value` under `name` for `life_s` seconds."""
        until = time.time() + life_s + _CLOCK_SKEW_S
        content = to_json(_SharedValue(until, msgspec.Raw(to_json(value))))
        signed = self._signer.sign(_shared(name), content)
        await self._client.set(name, signed, px=int(life_s * 1000))

    async def read(self, name: str, kind: type[T]) -> T | None:
        """Return the value of `name`, at most half a second old; None if there is none.

        Raises:
            BrokerError: If Redis does not answer, or a process with another secret has written it.
            ValueError: If it is of another type.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            now = asyncio.get_running_loop().time()
            read_at, cached = self._cache.get(name, (-_FRESH_S, None))
            if now - read_at < _FRESH_S:
                return cast("T | None", cached)
            content = await self._client.get(name)
            value = None if content is None else self._value(name, bytes(content), kind)  # type: ignore[arg-type]
            self._cache[name] = now, value
            return value

    def _value(self, name: str, content: bytes, kind: type[T]) -> T | None:
        try:
            verified = self._signer.verify(_shared(name), content)
        except SignatureError as error:
            logger.warning("the value of %s is refused: %s", name, error)
            raise BrokerError(_SECRETS_DIFFER) from error
        shared = from_json(_SharedValue, verified)
        return from_json(kind, bytes(shared.value)) if time.time() < shared.until else None


def _shared(name: str) -> str:
    return f"shared {name}"


def _answer_to(event_id: str) -> str:
    return f"answer:{event_id}"


class _Event(msgspec.Struct):
    event: str
    id: str
    at: float
    """Unix time at which it was sent."""
    arguments: Mapping[str, Any]


class _Answer(msgspec.Struct, omit_defaults=True):
    value: msgspec.Raw = msgspec.Raw(b"null")
    refused: str = ""
    """The sentence of a refusal; empty if there was none."""
    status: int = 500
    """The refusal's HTTP status."""


class LeaderRpc:
    """Calls from gateways to the leader: events on a stream, each with its answer in a list of its own.

    Gateways call `ask`; the leader runs `serve`. Callers define the names and arguments of events
    (`ndif.control.remote_leader`).
    """

    def __init__(self, client: Redis, signer: Signer) -> None:
        self._client = client
        self._signer = signer
        self._answering: set[asyncio.Task[Any]] = set()
        self._answered: dict[str, float] = {}
        """Times of the events that were carried out, kept until a repetition is refused as too old."""

    async def ask(self, event: str, arguments: Mapping[str, Any]) -> bytes:
        """Wait for the leader's answer as long as there is a leader, and return the answer's JSON.

        Raises:
            OperationError: If the leader refuses; with status 503 if it cannot be asked.
        """
        event_id = uuid.uuid4().hex
        call = _Event(event, event_id, time.time(), arguments)
        entry = {"event": self._signer.sign(_STREAM, to_json(call))}
        try:
            await self._client.xadd(_STREAM, entry, maxlen=_MAX_EVENTS)  # type: ignore[arg-type]
            answer = await self._answer(event_id)
        except SignatureError as error:
            raise OperationError(503, f"The server cannot be asked: {_SECRETS_DIFFER}.") from error
        except BrokerError as error:
            raise OperationError(503, f"The server cannot be asked: {error}.") from error
        if answer.refused:
            raise OperationError(answer.status, answer.refused)
        return bytes(answer.value)

    async def _answer(self, event_id: str) -> _Answer:
        polls_without_leader = 0
        while polls_without_leader * _BLOCK_S < _STALE_S:
            popped = await self._client.blpop([_answer_to(event_id)], timeout=_BLOCK_S)
            if popped is not None:
                answer = bytes(popped[1])  # type: ignore[arg-type]
                return from_json(_Answer, self._signer.verify(_answer_to(event_id), answer))
            leads = await has_leader(self._client)
            polls_without_leader = 0 if leads else polls_without_leader + 1
        raise OperationError(503, _NO_LEADER)

    async def serve(self, handler: Handler) -> None:
        """Answer events concurrently until cancelled. Only the leader calls this."""
        last: str | bytes = ""
        try:
            while True:
                try:
                    last = last or await self._first()
                    streams: Any = await self._client.xread(
                        {_STREAM: last}, count=64, block=_BLOCK_S * 1000
                    )
                except BrokerError as error:
                    logger.warning("events cannot be read: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                for entry_id, entry in (item for _, entries in streams for item in entries):
                    last = entry_id
                    start(self._carry_out(entry, handler), self._answering, "event")
        finally:
            await end(list(self._answering))

    async def _first(self) -> str:
        """Return a stream id just before the oldest event whose caller may still wait, by Redis' clock."""
        seconds, _ = await self._client.time()
        return f"{int((seconds - _STALE_S) * 1000)}-0"

    async def _carry_out(self, entry: Mapping[bytes, bytes], handler: Handler) -> None:
        message = entry.get(b"event", b"")
        try:
            call = from_json(_Event, self._signer.verify(_STREAM, message))
        except SignatureError as error:
            logger.warning("an event is refused: %s", error)
            # A caller with another secret must not wait: the answer's signature reveals the difference.
            with contextlib.suppress(ValueError):
                event_id = from_json(_Event, unverified(message)).id
                if _EVENT_ID.fullmatch(event_id):
                    await self._send(event_id, "refused", _Answer())
            return
        event_id, event, at = call.id, call.event, call.at
        now = time.time()
        oldest = now - _STALE_S - _CLOCK_SKEW_S
        self._answered = {
            answered_id: sent_at
            for answered_id, sent_at in self._answered.items()
            if sent_at >= oldest
        }
        if event_id in self._answered:
            return
        if at < oldest:  # a repeated recording, or its caller's clock is behind
            await self._send(
                event_id, event, _Answer(refused=_CLOCKS_DIFFER.format(now - at), status=503)
            )
            return
        self._answered[event_id] = at
        try:
            answer = _Answer(msgspec.Raw(await handler(event, call.arguments)))
        except OperationError as error:
            answer = _Answer(refused=str(error), status=error.status)
        except Exception:
            logger.exception("the event %s could not be carried out", event)
            answer = _Answer(refused="The server failed; its log says why.")
        await self._send(event_id, event, answer)

    async def _send(self, event_id: str, event: str, answer: _Answer) -> None:
        key = _answer_to(event_id)
        try:
            pipeline = self._client.pipeline()  # a transaction, so that every answer expires
            pipeline.rpush(key, self._signer.sign(key, to_json(answer)))
            pipeline.expire(key, _ANSWER_TTL_S)
            with broker_errors():
                await within(pipeline.execute(), ANSWER_S)
        except BrokerError as error:
            logger.warning("the answer to %s is lost: %s", event, error)
