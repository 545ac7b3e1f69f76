"""The registry of users, keys and tiers, which operators read and change."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Literal

from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from ndif.config.short_ids import matching_ids
from ndif.schema.account import (
    AccountTier,
    AccountUser,
    ApiKey,
    ImportedKeys,
    NewApiKey,
    Tier,
    UserWithKeys,
)
from ndif.schema.answer import project
from ndif.stores.accounts.port import (
    ImportedKey,
    NotInRegistryError,
    RegistryError,
    digest_of,
    new_key,
    runner_key_of,
)
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.foreign import read_foreign
from ndif.stores.accounts.sql.tables import ASSIGNMENTS, KEYS, TIERS, USERS

_ID_BYTES = 6
_BATCH = 1000
_MAX_QUOTED = 100


class SqlRegistry:
    """The `Registry` of a `Database`. Each method is one transaction.

    Keys are named by their id or its beginning, users and tiers by their name.
    """

    def __init__(self, database: Database) -> None:
        """Read and change `database`, whose schema is migrated on first use.

        A missing database is created only by methods that add a key or a tier.
        """
        self._database = database
        self._is_ready = False

    async def close(self) -> None:
        """Close the connections."""
        await self._database.close()

    # Keys

    async def create_key(
        self,
        user: str | None,
        name: str = "",
        expires_at: float | None = None,
        tiers: Iterable[str] = (),
    ) -> NewApiKey:
        key = new_key()
        async with self._writing(creates=True) as connection:
            added = [await _tier_id(connection, tier) for tier in dict.fromkeys(tiers)]
            key_id = await _add_key(connection, digest_of(key), user, name, expires_at)
            await _assign(connection, key_id, added)
            (row,) = await _keys(connection, KEYS.c.id == key_id)
        return project(NewApiKey, row, api_key=key)

    async def keys(self, user: str | None = None) -> list[ApiKey]:
        async with self._reading() as connection:
            return await _keys(connection, *(() if user is None else (USERS.c.name == user,)))

    async def key(self, given: str) -> ApiKey:
        async with self._reading() as connection:
            (row,) = await _keys(connection, KEYS.c.id == await _key_id(connection, given))
            return row

    async def revoke(self, given: str) -> ApiKey:
        async with self._writing() as connection:
            key_id = await _key_id(connection, given)
            await connection.execute(
                update(KEYS)
                .where(KEYS.c.id == key_id, KEYS.c.revoked_at.is_(None))
                .values(revoked_at=time.time())
            )
            (row,) = await _keys(connection, KEYS.c.id == key_id)
            return row

    async def import_keys(self, keys: Iterable[ImportedKey]) -> ImportedKeys:
        async with self._writing(creates=True) as connection:
            return await _import(connection, keys)

    async def copy_foreign(self) -> ImportedKeys:
        async with self._writing(may_be_foreign=True) as connection:
            return await _import(connection, await read_foreign(connection))

    # Tiers

    async def tiers(self) -> list[AccountTier]:
        async with self._reading() as connection:
            return await _tiers(connection)

    async def create_tier(self, tier: Tier) -> AccountTier:
        async with self._writing(creates=True) as connection:
            await _add_tier(connection, tier)
            (row,) = await _tiers(connection, TIERS.c.name == tier.name)
            return row

    async def change_tier(self, name: str, changes: Mapping[str, Any]) -> AccountTier:
        async with self._writing() as connection:
            tier_id = await _tier_id(connection, name)
            if changes:
                await connection.execute(
                    update(TIERS).where(TIERS.c.id == tier_id).values(**changes)
                )
            (row,) = await _tiers(connection, TIERS.c.id == tier_id)
            return row

    async def delete_tier(self, name: str) -> None:
        async with self._writing() as connection:
            tier_id = await _tier_id(connection, name)
            (row,) = await _tiers(connection, TIERS.c.id == tier_id)
            if row.keys:
                raise RegistryError(
                    f"The tier {name!r} has {row.keys} keys: withdraw it from them first."
                )
            await connection.execute(delete(TIERS).where(TIERS.c.id == tier_id))

    async def assign(self, tier: str, key: str) -> ApiKey:
        async with self._writing() as connection:
            tier_id, key_id = await _tier_id(connection, tier), await _key_id(connection, key)
            has = await connection.execute(
                select(ASSIGNMENTS).where(
                    ASSIGNMENTS.c.key_id == key_id, ASSIGNMENTS.c.tier_id == tier_id
                )
            )
            if has.first() is None:
                await _assign(connection, key_id, [tier_id])
            (row,) = await _keys(connection, KEYS.c.id == key_id)
            return row

    async def withdraw(self, tier: str, key: str) -> ApiKey:
        async with self._writing() as connection:
            tier_id, key_id = await _tier_id(connection, tier), await _key_id(connection, key)
            await connection.execute(
                delete(ASSIGNMENTS).where(
                    ASSIGNMENTS.c.key_id == key_id, ASSIGNMENTS.c.tier_id == tier_id
                )
            )
            (row,) = await _keys(connection, KEYS.c.id == key_id)
            return row

    # Users

    async def users(self) -> list[AccountUser]:
        async with self._reading() as connection:
            return await _users(connection)

    async def user(self, name: str) -> UserWithKeys:
        async with self._reading() as connection:
            users = await _users(connection, USERS.c.name == name)
            if not users:
                raise NotInRegistryError(f"There is no user {name[:_MAX_QUOTED]!r}.")
            keys = await _keys(connection, USERS.c.name == name)
            return project(UserWithKeys, users[0], keys=keys)

    # Transactions

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        await self._prepare()
        async with self._database.reading() as connection:
            yield connection

    @asynccontextmanager
    async def _writing(
        self, *, creates: bool = False, may_be_foreign: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        await self._prepare(creates=creates, may_be_foreign=may_be_foreign)
        async with self._database.writing() as connection:
            yield connection

    async def _prepare(self, *, creates: bool = False, may_be_foreign: bool = False) -> None:
        """Migrate the schema once.

        With `may_be_foreign`, raise a `RegistryError` if the database has no tables of another server to
        copy. Otherwise raise a `RegistryError` if the database belongs to another server, or a
        `NotInRegistryError` if there is none and the caller does not create it (`creates`).
        """
        if may_be_foreign:
            if not await self._database.has_foreign():
                raise RegistryError(
                    f"The database of API keys ({self._database.name}) has no tables of another NDIF "
                    "server: there is nothing to copy."
                )
        elif self._is_ready:
            return
        else:
            shape = await self._database.shape()
            if shape == "foreign":
                raise RegistryError(
                    f"The database of API keys ({self._database.name}) belongs to another NDIF server; it "
                    "is only read. `ndif keys migrate` copies its keys into tables of this server's own."
                )
            if shape == "empty" and not creates:
                raise NotInRegistryError(
                    f"There is no database of API keys at {self._database.name}. `ndif start` makes one, "
                    "and so does `ndif keys create`. If there should be one, set NDIF_SESSION_ROOT and "
                    "NDIF_DATABASE_URL as for the server."
                )
        await self._database.migrate()
        self._is_ready = True


async def _keys(connection: AsyncConnection, *where: ColumnElement[bool]) -> list[ApiKey]:
    result = await connection.execute(
        select(KEYS, USERS.c.name.label("user"))
        .select_from(KEYS.outerjoin(USERS))
        .where(*where)
        .order_by(KEYS.c.created_at, KEYS.c.id)
    )
    rows = result.mappings().all()
    assignments = await connection.execute(
        select(ASSIGNMENTS.c.key_id, TIERS.c.name)
        .select_from(ASSIGNMENTS.join(TIERS).join(KEYS).outerjoin(USERS))
        .where(*where)
        .order_by(TIERS.c.name)
    )
    tiers: dict[str, list[str]] = defaultdict(list)
    for key_id, tier in assignments:
        tiers[key_id].append(tier)
    now = time.time()
    return [
        ApiKey(
            id=row["id"],
            user=row["user"],
            name=row["name"],
            state=_state(row["revoked_at"], row["expires_at"], now),
            tiers=tiers[row["id"]],
            created=row["created_at"],
            expires=row["expires_at"],
            last_used=row["last_used_at"],
            revoked=row["revoked_at"],
            account=runner_key_of(row["digest"]),
        )
        for row in rows
    ]


def _state(
    revoked: float | None, expires: float | None, now: float
) -> Literal["VALID", "EXPIRED", "REVOKED"]:
    if revoked is not None:
        return "REVOKED"
    return "EXPIRED" if expires is not None and expires <= now else "VALID"


async def _key_id(connection: AsyncConnection, given: str) -> str:
    """Return the only id that begins with `given`."""
    query = select(KEYS.c.id).where(KEYS.c.id.startswith(given.lower(), autoescape=True)).limit(2)
    ids = matching_ids(given.lower(), (await connection.execute(query)).scalars()) if given else []
    if not ids:
        raise NotInRegistryError(
            f"There is no key {given[:_MAX_QUOTED]!r}; `ndif keys list` shows the ids of all keys."
        )
    if len(ids) > 1:
        raise RegistryError(f"{given!r} is the beginning of several ids: give more of it.")
    return ids[0]


async def _add_key(
    connection: AsyncConnection, digest: str, user: str | None, name: str, expires_at: float | None
) -> str:
    key_id = secrets.token_hex(_ID_BYTES)
    values = {
        "id": key_id,
        "digest": digest,
        "user_id": None if user is None else await _user_id(connection, user),
        "name": name,
        "created_at": time.time(),
        "expires_at": expires_at,
    }
    await connection.execute(insert(KEYS).values(**values))
    return key_id


async def _user_id(connection: AsyncConnection, name: str) -> int:
    """Return the id of the user with this name; add the user if there is none."""
    query = select(USERS.c.id).where(USERS.c.name == name)
    if (user_id := (await connection.execute(query)).scalar()) is not None:
        return int(user_id)
    try:
        async with connection.begin_nested():
            await connection.execute(insert(USERS).values(name=name, created_at=time.time()))
    except IntegrityError:  # another process was faster
        pass
    return int((await connection.execute(query)).scalar_one())


async def _assign(connection: AsyncConnection, key_id: str, tiers: Sequence[int]) -> None:
    if tiers:
        rows = [{"key_id": key_id, "tier_id": tier} for tier in tiers]
        await connection.execute(insert(ASSIGNMENTS), rows)


async def _import(connection: AsyncConnection, keys: Iterable[ImportedKey]) -> ImportedKeys:
    digests = set((await connection.execute(select(KEYS.c.digest))).scalars())
    by_digest = {key.digest: key for key in keys}
    new = [key for key in by_digest.values() if key.digest not in digests]
    users = {
        name: await _user_id(connection, name) for name in sorted({k.user for k in new if k.user})
    }
    tiers = {tier.name: tier for key in new for tier in key.tiers}
    ids = {name: await _same_tier(connection, tiers[name]) for name in sorted(tiers)}
    now = time.time()
    rows, assigned = [], []
    for key in new:
        key_id = secrets.token_hex(_ID_BYTES)
        values = {"id": key_id, "digest": key.digest, "name": key.name, "created_at": now}
        rows.append({**values, "user_id": users[key.user] if key.user else None})
        assigned += [{"key_id": key_id, "tier_id": ids[tier.name]} for tier in key.tiers]
    # In batches, because a statement has a time limit.
    for start in range(0, len(rows), _BATCH):
        await connection.execute(insert(KEYS), rows[start : start + _BATCH])
    for start in range(0, len(assigned), _BATCH):
        await connection.execute(insert(ASSIGNMENTS), assigned[start : start + _BATCH])
    return ImportedKeys(imported=len(new), known=len(by_digest) - len(new))


async def _same_tier(connection: AsyncConnection, tier: Tier) -> int:
    """Return the id of a tier, which is added if missing; raise if a different tier has its name."""
    tiers = await _tiers(connection, TIERS.c.name == tier.name)
    if not tiers:
        await _add_tier(connection, tier)
    elif any(getattr(tiers[0], name) != value for name, value in asdict(tier).items()):
        raise RegistryError(
            f"The tier {tier.name!r} exists, with other rights than the keys to be imported have."
        )
    return await _tier_id(connection, tier.name)


async def _add_tier(connection: AsyncConnection, tier: Tier) -> None:
    try:
        await connection.execute(insert(TIERS).values(**asdict(tier)))
    except IntegrityError as error:
        raise RegistryError(f"There is a tier {tier.name!r} already.") from error


async def _tier_id(connection: AsyncConnection, name: str) -> int:
    tier_id = (await connection.execute(select(TIERS.c.id).where(TIERS.c.name == name))).scalar()
    if tier_id is None:
        raise NotInRegistryError(
            f"There is no tier {name[:_MAX_QUOTED]!r}; `ndif tiers list` shows all tiers."
        )
    return int(tier_id)


async def _tiers(connection: AsyncConnection, *where: ColumnElement[bool]) -> list[AccountTier]:
    result = await connection.execute(
        select(TIERS, func.count(ASSIGNMENTS.c.key_id).label("keys"))
        .select_from(TIERS.outerjoin(ASSIGNMENTS))
        .where(*where)
        .group_by(TIERS.c.id)
        .order_by(TIERS.c.name)
    )
    return [
        AccountTier(**{name: value for name, value in row.items() if name != "id"})
        for row in result.mappings()
    ]


async def _users(connection: AsyncConnection, *where: ColumnElement[bool]) -> list[AccountUser]:
    result = await connection.execute(
        select(
            USERS.c.name,
            USERS.c.created_at.label("created"),
            func.count(KEYS.c.id).label("keys"),
            func.max(KEYS.c.last_used_at).label("last_used"),
        )
        .select_from(USERS.outerjoin(KEYS))
        .where(*where)
        .group_by(USERS.c.id)
        .order_by(USERS.c.name)
    )
    return [AccountUser(**row) for row in result.mappings()]
