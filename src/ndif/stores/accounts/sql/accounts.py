"""The form of `Accounts` whose users are in a database."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cachetools import TTLCache
from sqlalchemy import bindparam, select, update

from ndif.schema.account import RIGHTS, Tier
from ndif.stores.accounts.keyed import KeyedAccounts
from ndif.stores.accounts.port import (
    Account,
    AccountsUnavailableError,
    KeysError,
    NoSuchKeyError,
    account_of,
)
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.foreign import read_foreign
from ndif.stores.accounts.sql.registry import SqlRegistry
from ndif.stores.accounts.sql.tables import ASSIGNMENTS, KEYS, TIERS, USERS
from ndif.tasks import end

logger = logging.getLogger(__name__)

_MAX_CACHED = 16_384
"""Maximum keys, and maximum unknown keys, that are cached."""
_UNAVAILABLE_S = 1.0
"""Seconds after a failure in which the database is not asked again."""
_FLUSH_S = 10.0
"""Seconds between two writes of the last uses of keys."""


@dataclass(frozen=True, slots=True)
class _Key:
    account: Account
    id: str | None = None
    """None for another server's database, which is not written."""
    expires_at: float | None = None
    revoked_at: float | None = None


class SqlAccounts(KeyedAccounts):
    """Keys in a `Database`; known and unknown keys are cached for a few seconds.

    The tables of another NDIF server are read as a whole, once per lifetime of the cache (`foreign.py`).
    The last uses of keys are stored in batches. While the database is unavailable, cached keys stay valid,
    and no other key is accepted.
    """

    def __init__(
        self,
        database: Database,
        cache_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Read `database`; its answers are cached for `cache_s` seconds of `clock`.

        `wall` returns Unix time, by which keys expire.
        """
        super().__init__()
        self._database = database
        self._registry = SqlRegistry(database)
        self._cache_s = cache_s
        self._clock = clock
        self._wall = wall
        self._known: TTLCache[str, _Key] = TTLCache(_MAX_CACHED, cache_s, clock)
        self._unknown: TTLCache[str, None] = TTLCache(_MAX_CACHED, cache_s, clock)
        self._lookups: dict[str, asyncio.Task[_Key | None]] = {}
        self._foreign: dict[str, _Key] | None = None
        """All keys of another server's tables; None if the tables are this server's."""
        self._foreign_until = clock()
        self._refreshing = asyncio.Lock()
        self._unavailable: tuple[float, str] = (clock(), "")
        self._used: dict[str, float] = {}
        self._storing: asyncio.Task[None] | None = None

    @property
    def registry(self) -> SqlRegistry:
        return self._registry

    async def start(self) -> None:
        self._storing = asyncio.create_task(self._store_forever(), name="last uses of keys")

    async def stop(self) -> None:
        await end([*self._lookups.values(), *([self._storing] if self._storing else [])])
        with contextlib.suppress(AccountsUnavailableError):
            await self.store_uses()
        await self._database.close()

    async def ping(self) -> None:
        async with self._database.reading() as connection:
            await connection.execute(select(1))

    async def _find(self, digest: str) -> Account | None:
        blinded = self._blinded(digest)
        key: _Key | None
        try:  # `TTLCache.get` looks twice
            key = self._known[blinded]
        except KeyError:
            key = None if blinded in self._unknown else await self._shared_lookup(digest, blinded)
        if key is None:
            return None
        now = self._wall()
        if key.revoked_at is not None:
            raise NoSuchKeyError("This API key was revoked. Ask the server's operator for another.")
        if key.expires_at is not None and key.expires_at <= now:
            raise NoSuchKeyError("This API key has expired. Ask the server's operator for another.")
        if key.id is not None:
            self._used[key.id] = now
        return key.account

    async def _shared_lookup(self, digest: str, blinded: str) -> _Key | None:
        """Look up a key in the database; concurrent calls for the same key share one query."""
        task = self._lookups.get(blinded)
        if task is None:
            task = self._lookups[blinded] = asyncio.create_task(self._look_up(digest, blinded))
            task.add_done_callback(partial(self._forget_lookup, blinded))
        return await asyncio.shield(task)

    def _forget_lookup(self, blinded: str, task: asyncio.Task[_Key | None]) -> None:
        del self._lookups[blinded]
        # Retrieve the error, since all callers may have left.
        if not task.cancelled():
            task.exception()

    async def _look_up(self, digest: str, blinded: str) -> _Key | None:
        now = self._clock()
        until, reason = self._unavailable
        if now < until:
            raise AccountsUnavailableError(reason)
        try:
            key = await self._read(digest, blinded)
        except AccountsUnavailableError as error:
            logger.warning("The database of API keys does not answer: %s", error)
            self._unavailable = (now + _UNAVAILABLE_S, str(error))
            raise
        except KeysError as error:
            raise AccountsUnavailableError(str(error)) from error
        if key is None:
            self._unknown[blinded] = None
        else:
            self._known[blinded] = key
        return key

    async def _read(self, digest: str, blinded: str) -> _Key | None:
        async with self._refreshing:
            now = self._clock()
            if now >= self._foreign_until:
                # An operator may have copied its keys meanwhile.
                is_foreign = await self._database.shape() == "foreign"
                self._foreign = await self._read_foreign() if is_foreign else None
                self._foreign_until = now + self._cache_s
        if self._foreign is not None:
            return self._foreign.get(blinded)
        async with self._database.reading() as connection:
            rows = (await connection.execute(_ONE_KEY, {"digest": digest})).mappings().all()
        if not rows:
            return None
        tiers = [
            Tier(name=row["tier"], **{name: row[name] for name in (*RIGHTS, "weight", "limits")})
            for row in rows
            if row["tier"] is not None
        ]
        first = rows[0]
        account = account_of(digest, first["user"], tiers)
        return _Key(account, first["id"], first["expires_at"], first["revoked_at"])

    async def _read_foreign(self) -> dict[str, _Key]:
        async with self._database.reading() as connection:
            keys = await read_foreign(connection)
        return await asyncio.to_thread(
            lambda: {
                self._blinded(key.digest): _Key(account_of(key.digest, key.user, key.tiers))
                for key in keys
            }
        )

    async def _store_forever(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            with contextlib.suppress(AccountsUnavailableError):  # tried again
                await self.store_uses()

    async def store_uses(self) -> None:
        """Store the last uses of keys that are not stored yet."""
        used, self._used = self._used, {}
        if not used:
            return
        # Sorted, so that no two processes wait for each other's locks.
        rows = [{"key": key, "moment": used[key]} for key in sorted(used)]
        try:
            async with self._database.writing() as connection:
                await connection.execute(_LAST_USE, rows)
        except AccountsUnavailableError:
            self._used = {**used, **self._used}
            raise


_ONE_KEY = (
    select(
        KEYS.c.id,
        KEYS.c.expires_at,
        KEYS.c.revoked_at,
        USERS.c.name.label("user"),
        TIERS.c.name.label("tier"),
        *(TIERS.c[name] for name in (*RIGHTS, "weight", "limits")),
    )
    .select_from(KEYS.outerjoin(USERS).outerjoin(ASSIGNMENTS).outerjoin(TIERS))
    .where(KEYS.c.digest == bindparam("digest"))
)
_LAST_USE = (
    update(KEYS).where(KEYS.c.id == bindparam("key")).values(last_used_at=bindparam("moment"))
)
