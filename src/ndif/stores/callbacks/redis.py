"""The queue of callbacks of a server with a broker: two sorted sets in Redis, and signed contents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import Any

from ndif.schema.callback import Callback
from ndif.stores.broker.signing import SignatureError, Signer
from ndif.stores.callbacks.port import CallbackLimits, require_room
from ndif.stores.redis import ANSWER_S, Redis, broker_errors
from ndif.tasks import within

logger = logging.getLogger(__name__)

_CONTENTS = "callbacks:contents"
"""Hash of the signed callbacks by their ids."""
_WAITING, _DEAD = "callbacks:waiting", "callbacks:dead"
"""Sorted sets of "ID HOST USER" by the time at which a callback is due, or was given up."""
_POLL_S = 1.0
_PAGE = 500


class RedisCallbacks:
    """A `CallbackQueue` in Redis.

    Contents are signed: an attacker who can only write to Redis can repeat, delay or delete a callback, but
    cannot forge one. Callbacks need no claims, because only the leader reads due ones.
    """

    def __init__(
        self,
        client: Redis,
        signer: Signer,
        limits: CallbackLimits = CallbackLimits(),  # noqa: B008 - it is immutable
    ) -> None:
        # Untyped, because redis-py types every answer as possible text.
        self._client: Any = client
        self._signer = signer
        self._limits = limits

    async def stop(self) -> None:
        """See `CallbackQueue.stop`."""

    async def add(self, callback: Callback) -> None:
        await require_room(self, callback.user, self._limits)
        await self.update(callback)

    async def update(self, callback: Callback) -> None:
        callback_id, member = callback.id, _member(callback)
        signed = self._signer.sign(_place(callback_id), callback.encode())
        into, out_of = (_DEAD, _WAITING) if callback.dead else (_WAITING, _DEAD)
        await self._execute_atomically(
            ("HSET", _CONTENTS, callback_id, signed),
            ("ZREM", out_of, member),
            ("ZADD", into, callback.due, member),
            ("SREM" if callback.dead else "SADD", _user_key(callback.user), callback_id),
        )
        if callback.dead:
            oldest = await self._client.zrange(_DEAD, 0, -self._limits.dead - 1)
            await self._forget(oldest)

    async def remove(self, callback_id: str) -> None:
        content = await self._client.hget(_CONTENTS, callback_id)
        callback = None if content is None else self._decode(callback_id, bytes(content))
        if callback is not None:
            await self._forget([_member(callback).encode()])

    async def due(self, now: float, limit: int, busy: Collection[str] = ()) -> list[Callback]:
        callbacks: list[Callback] = []
        start = 0
        while len(callbacks) < limit:
            page: list[bytes] = await self._client.zrangebyscore(
                _WAITING, "-inf", now, start=start, num=_PAGE
            )
            free = [member for member in page if _host_of(member) not in busy]
            callbacks += await self._read(free[: limit - len(callbacks)])
            start += len(page)
            if len(page) < _PAGE:
                break
        return callbacks

    async def wait(self, seconds: float) -> None:
        """See `CallbackQueue.wait`. Returns soon, because other processes add callbacks unnoticed."""
        await asyncio.sleep(min(seconds, _POLL_S))

    async def all(self, limit: int) -> list[Callback]:
        dead = await self._client.zrange(_DEAD, 0, limit - 1)
        waiting = await self._client.zrange(_WAITING, 0, limit - 1)
        return await self._read([*dead, *waiting][:limit])

    async def find(self, request_id: str) -> list[Callback]:
        members: list[bytes] = []
        for name in (_DEAD, _WAITING):
            members += await self._client.zrange(name, 0, -1)
        prefix = request_id.encode()
        return await self._read([member for member in members if member.startswith(prefix)])

    async def waiting_of(self, user: str) -> int:
        return int(await self._client.scard(_user_key(user)))

    async def counts(self) -> tuple[int, int]:
        return int(await self._client.zcard(_WAITING)), int(await self._client.zcard(_DEAD))

    async def forget_dead(self, before: float) -> None:
        await self._forget(await self._client.zrangebyscore(_DEAD, "-inf", f"({before}"))

    async def _read(self, members: Iterable[bytes]) -> list[Callback]:
        by_id = {_id_of(member): member for member in members}
        if not by_id:
            return []
        contents: Any = await self._client.hmget(_CONTENTS, [*by_id])
        callbacks, strays = [], []
        for (callback_id, member), content in zip(by_id.items(), contents, strict=True):
            callback = None if content is None else self._decode(callback_id, bytes(content))
            if callback is None:
                strays.append(member)
            else:
                callbacks.append(callback)
        await self._forget(strays)
        return callbacks

    def _decode(self, callback_id: str, content: bytes) -> Callback | None:
        try:
            return Callback.decode(self._signer.verify(_place(callback_id), content))
        except SignatureError as error:
            logger.warning("the webhook or mail %s is refused: %s", callback_id, error)
        except (ValueError, TypeError) as error:
            logger.warning("the webhook or mail %s cannot be read: %s", callback_id, error)
        return None

    async def _forget(self, members: Iterable[bytes]) -> None:
        if removed := [*members]:
            await self._execute_atomically(
                ("ZREM", _WAITING, *removed),
                ("ZREM", _DEAD, *removed),
                ("HDEL", _CONTENTS, *map(_id_of, removed)),
                *(("SREM", _user_key(_user_of(member)), _id_of(member)) for member in removed),
            )

    async def _execute_atomically(self, *commands: tuple[Any, ...]) -> None:
        pipeline = self._client.pipeline()  # a transaction
        for command in commands:
            pipeline.execute_command(*command)
        with broker_errors():
            await within(pipeline.execute(), ANSWER_S)


def _place(callback_id: str) -> str:
    return f"callback {callback_id}"


def _user_key(user: str) -> str:
    return f"callbacks:of:{user}"


def _member(callback: Callback) -> str:
    return f"{callback.id} {callback.host} {callback.user}"


def _id_of(member: bytes) -> str:
    return _parts(member)[0]


def _host_of(member: bytes) -> str:
    return _parts(member)[1]


def _user_of(member: bytes) -> str:
    return _parts(member)[2]


def _parts(member: bytes) -> list[str]:
    """Return id, host and user, with empty strings for parts that a foreign member lacks."""
    return [*member.decode(errors="replace").split(" ", 2), "", ""][:3]
