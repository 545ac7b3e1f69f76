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
        async with self._changing(makes=True) as on:
            added = [await _tier_id(on, tier) for tier in dict.fromkeys(tiers)]
            key_id = await _add_key(on, digest_of(key), user, name, expires_at)
            await _assign(on, key_id, added)
            (row,) = await _keys(on, KEYS.c.id == key_id)
        return project(NewApiKey, row, api_key=key)

    async def keys(self, user: str | None = None) -> list[ApiKey]:
        async with self._looking() as on:
            return await _keys(on, *(() if user is None else (USERS.c.name == user,)))

    async def key(self, given: str) -> ApiKey:
        async with self._looking() as on:
            (row,) = await _keys(on, KEYS.c.id == await _key_id(on, given))
            return row

    async def revoke(self, given: str) -> ApiKey:
        async with self._changing() as on:
            key_id = await _key_id(on, given)
            await on.execute(
                update(KEYS)
                .where(KEYS.c.id == key_id, KEYS.c.revoked_at.is_(None))
                .values(revoked_at=time.time())
            )
            (row,) = await _keys(on, KEYS.c.id == key_id)
            return row

    async def import_keys(self, keys: Iterable[ImportedKey]) -> ImportedKeys:
        async with self._changing(makes=True) as on:
            return await _import(on, keys)

    async def copy_foreign(self) -> ImportedKeys:
        async with self._changing(may_be_foreign=True) as on:
            return await _import(on, await read_foreign(on))

    # Tiers

    async def tiers(self) -> list[AccountTier]:
        async with self._looking() as on:
            return await _tiers(on)

    async def create_tier(self, tier: Tier) -> AccountTier:
        async with self._changing(makes=True) as on:
            await _add_tier(on, tier)
            (row,) = await _tiers(on, TIERS.c.name == tier.name)
            return row

    async def change_tier(self, name: str, changes: Mapping[str, Any]) -> AccountTier:
        async with self._changing() as on:
            tier_id = await _tier_id(on, name)
            if changes:
                await on.execute(update(TIERS).where(TIERS.c.id == tier_id).values(**changes))
            (row,) = await _tiers(on, TIERS.c.id == tier_id)
            return row

    async def delete_tier(self, name: str) -> None:
        async with self._changing() as on:
            tier_id = await _tier_id(on, name)
            (row,) = await _tiers(on, TIERS.c.id == tier_id)
            if row.keys:
                raise RegistryError(
                    f"The tier {name!r} has {row.keys} keys: withdraw it from them first."
                )
            await on.execute(delete(TIERS).where(TIERS.c.id == tier_id))

    async def assign(self, tier: str, key: str) -> ApiKey:
        async with self._changing() as on:
            tier_id, key_id = await _tier_id(on, tier), await _key_id(on, key)
            has = await on.execute(
                select(ASSIGNMENTS).where(
                    ASSIGNMENTS.c.key_id == key_id, ASSIGNMENTS.c.tier_id == tier_id
                )
            )
            if has.first() is None:
                await _assign(on, key_id, [tier_id])
            (row,) = await _keys(on, KEYS.c.id == key_id)
            return row

    async def withdraw(self, tier: str, key: str) -> ApiKey:
        async with self._changing() as on:
            tier_id, key_id = await _tier_id(on, tier), await _key_id(on, key)
            await on.execute(
                delete(ASSIGNMENTS).where(
                    ASSIGNMENTS.c.key_id == key_id, ASSIGNMENTS.c.tier_id == tier_id
                )
            )
            (row,) = await _keys(on, KEYS.c.id == key_id)
            return row

    # Users

    async def users(self) -> list[AccountUser]:
        async with self._looking() as on:
            return await _users(on)

    async def user(self, name: str) -> UserWithKeys:
        async with self._looking() as on:
            found = await _users(on, USERS.c.name == name)
            if not found:
                raise NotInRegistryError(f"There is no user {name[:_MAX_QUOTED]!r}.")
            keys = await _keys(on, USERS.c.name == name)
            return project(UserWithKeys, found[0], keys=keys)

    # Transactions

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[AsyncConnection]:
        await self._prepare()
        async with self._database.reading() as connection:
            yield connection

    @asynccontextmanager
    async def _changing(
        self, *, makes: bool = False, may_be_foreign: bool = False
    ) -> AsyncIterator[AsyncConnection]:
        await self._prepare(makes=makes, may_be_foreign=may_be_foreign)
        async with self._database.writing() as connection:
            yield connection

    async def _prepare(self, *, makes: bool = False, may_be_foreign: bool = False) -> None:
        """Migrate the schema once.

        Raise a `RegistryError` if the database is another server's, or has none to copy if it
        `may_be_foreign`; raise a `NotInRegistryError` if there is none, unless this `makes` one.
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
                    f"The database of API keys ({self._database.name}) is that of another NDIF server, and "
                    "is only read. `ndif keys migrate` copies its keys into tables of this server's own."
                )
            if shape == "empty" and not makes:
                raise NotInRegistryError(
                    f"There is no database of API keys at {self._database.name}. `ndif start` makes one, "
                    "and so does `ndif keys create`. If there should be one, NDIF_SESSION_ROOT or "
                    "NDIF_DATABASE_URL is not that of the server."
                )
        await self._database.migrate()
        self._is_ready = True


async def _keys(on: AsyncConnection, *where: ColumnElement[bool]) -> list[ApiKey]:
    found = await on.execute(
        select(KEYS, USERS.c.name.label("user"))
        .select_from(KEYS.outerjoin(USERS))
        .where(*where)
        .order_by(KEYS.c.created_at, KEYS.c.id)
    )
    rows = found.mappings().all()
    named = await on.execute(
        select(ASSIGNMENTS.c.key_id, TIERS.c.name)
        .select_from(ASSIGNMENTS.join(TIERS).join(KEYS).outerjoin(USERS))
        .where(*where)
        .order_by(TIERS.c.name)
    )
    tiers: dict[str, list[str]] = defaultdict(list)
    for key_id, tier in named:
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


async def _key_id(on: AsyncConnection, given: str) -> str:
    """Return the only id that begins with `given`."""
    begins = select(KEYS.c.id).where(KEYS.c.id.startswith(given.lower(), autoescape=True)).limit(2)
    found = matching_ids(given.lower(), (await on.execute(begins)).scalars()) if given else []
    if not found:
        raise NotInRegistryError(
            f"There is no key {given[:_MAX_QUOTED]!r}; `ndif keys list` shows the ids of those that are."
        )
    if len(found) > 1:
        raise RegistryError(f"{given!r} is the beginning of several ids: give more of it.")
    return found[0]


async def _add_key(
    on: AsyncConnection, digest: str, user: str | None, name: str, expires_at: float | None
) -> str:
    key_id = secrets.token_hex(_ID_BYTES)
    values = {
        "id": key_id,
        "digest": digest,
        "user_id": None if user is None else await _user_id(on, user),
        "name": name,
        "created_at": time.time(),
        "expires_at": expires_at,
    }
    await on.execute(insert(KEYS).values(**values))
    return key_id


async def _user_id(on: AsyncConnection, name: str) -> int:
    """Return the id of the user of that name, who is added if there is none."""
    query = select(USERS.c.id).where(USERS.c.name == name)
    if (found := (await on.execute(query)).scalar()) is not None:
        return int(found)
    try:
        async with on.begin_nested():
            await on.execute(insert(USERS).values(name=name, created_at=time.time()))
    except IntegrityError:  # another process was faster
        pass
    return int((await on.execute(query)).scalar_one())


async def _assign(on: AsyncConnection, key_id: str, tiers: Sequence[int]) -> None:
    if tiers:
        rows = [{"key_id": key_id, "tier_id": tier} for tier in tiers]
        await on.execute(insert(ASSIGNMENTS), rows)


async def _import(on: AsyncConnection, keys: Iterable[ImportedKey]) -> ImportedKeys:
    known = set((await on.execute(select(KEYS.c.digest))).scalars())
    given = {key.digest: key for key in keys}
    new = [key for key in given.values() if key.digest not in known]
    users = {name: await _user_id(on, name) for name in sorted({k.user for k in new if k.user})}
    tiers = {tier.name: tier for key in new for tier in key.tiers}
    ids = {name: await _same_tier(on, tiers[name]) for name in sorted(tiers)}
    now = time.time()
    rows, assigned = [], []
    for key in new:
        key_id = secrets.token_hex(_ID_BYTES)
        values = {"id": key_id, "digest": key.digest, "name": key.name, "created_at": now}
        rows.append({**values, "user_id": users[key.user] if key.user else None})
        assigned += [{"key_id": key_id, "tier_id": ids[tier.name]} for tier in key.tiers]
    # In batches, because a statement has a time limit.
    for start in range(0, len(rows), _BATCH):
        await on.execute(insert(KEYS), rows[start : start + _BATCH])
    for start in range(0, len(assigned), _BATCH):
        await on.execute(insert(ASSIGNMENTS), assigned[start : start + _BATCH])
    return ImportedKeys(imported=len(new), known=len(given) - len(new))


async def _same_tier(on: AsyncConnection, tier: Tier) -> int:
    """Return the id of a tier, which is added if missing; raise if a different tier has its name."""
    found = await _tiers(on, TIERS.c.name == tier.name)
    if not found:
        await _add_tier(on, tier)
    elif any(getattr(found[0], name) != value for name, value in asdict(tier).items()):
        raise RegistryError(
            f"The tier {tier.name!r} exists, with other rights than the keys to be imported have."
        )
    return await _tier_id(on, tier.name)


async def _add_tier(on: AsyncConnection, tier: Tier) -> None:
    try:
        await on.execute(insert(TIERS).values(**asdict(tier)))
    except IntegrityError as error:
        raise RegistryError(f"There is a tier {tier.name!r} already.") from error


async def _tier_id(on: AsyncConnection, name: str) -> int:
    found = (await on.execute(select(TIERS.c.id).where(TIERS.c.name == name))).scalar()
    if found is None:
        raise NotInRegistryError(
            f"There is no tier {name[:_MAX_QUOTED]!r}; `ndif tiers list` shows those that are."
        )
    return int(found)


async def _tiers(on: AsyncConnection, *where: ColumnElement[bool]) -> list[AccountTier]:
    found = await on.execute(
        select(TIERS, func.count(ASSIGNMENTS.c.key_id).label("keys"))
        .select_from(TIERS.outerjoin(ASSIGNMENTS))
        .where(*where)
        .group_by(TIERS.c.id)
        .order_by(TIERS.c.name)
    )
    return [
        AccountTier(**{name: value for name, value in row.items() if name != "id"})
        for row in found.mappings()
    ]


async def _users(on: AsyncConnection, *where: ColumnElement[bool]) -> list[AccountUser]:
    found = await on.execute(
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
    return [AccountUser(**row) for row in found.mappings()]
