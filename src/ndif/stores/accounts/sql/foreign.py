"""The keys in the database of another NDIF server, which is never written.

Its tables are `keys` (the column `key_id` is the key itself), `tiers` and `key_tier_assignments`; `users`
may be beside them. All keys are read at once, because a query for one key compares keys character by
character, and its time may reveal them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from sqlalchemy import MetaData, Select, String, Table, cast, null, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ndif.schema.account import Tier
from ndif.stores.accounts.port import ImportedKey, KeysError, digest_of, tier_with
from ndif.stores.accounts.sql.tables import FOREIGN

_RIGHTS = {"hotswap": "hotswapping", "priority": "priority"}
"""Rights of a tier by words in its name; none of them is `trusted`."""
_LONGEST_NAME = 64


async def read_foreign(connection: AsyncConnection) -> list[ImportedKey]:
    """Return every key; raise a `KeysError` if the tables cannot be understood."""
    metadata = MetaData()
    await connection.run_sync(
        lambda sync_connection: metadata.reflect(
            sync_connection,
            only=lambda name, _: name in (*FOREIGN, "users"),
            resolve_fks=False,
        )
    )
    keys, tiers, assignments = (metadata.tables[name] for name in FOREIGN)
    for table, column in (
        (tiers, "tier_id"),
        (tiers, "name"),
        (assignments, "tier_id"),
        (assignments, "key_id"),
    ):
        if column not in table.columns:
            raise KeysError(
                f"The table {table.name} of the database of API keys has no column {column}."
            )
    names = await connection.execute(
        select(cast(assignments.c.key_id, String), cast(tiers.c.name, String)).join(
            tiers, tiers.c.tier_id == assignments.c.tier_id
        )
    )
    of_key: dict[str, list[Tier]] = defaultdict(list)
    for key, name in names.all():
        of_key[key].append(_tier(name))
    rows = (await connection.execute(_all_keys(keys, metadata.tables.get("users")))).all()
    return await asyncio.to_thread(
        lambda: [ImportedKey(digest_of(key), user, of_key.get(key, ())) for key, user in rows]
    )


def _all_keys(keys: Table, users: Table | None) -> Select[str, str]:
    """Return the query for keys and the addresses of their users, if these are known."""
    key = cast(keys.c.key_id, String)
    names = set() if users is None else set(users.columns.keys())
    if users is None or not {"user_id", "email"} <= names or "user_id" not in keys.columns:
        return select(key, cast(null(), String))
    return select(key, cast(users.c.email, String)).select_from(
        keys.outerjoin(users, keys.c.user_id == users.c.user_id)
    )


def _tier(name: str) -> Tier:
    rights = [right for word, right in _RIGHTS.items() if word in name.lower()]
    return tier_with(rights, name[:_LONGEST_NAME])
