"""Accounts in a database: operators' changes, when a server sees them, and migrations."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from ndif.schema.account import ImportedKeys
from ndif.stores.accounts import (
    AccountsUnavailableError,
    Caller,
    ImportedKey,
    KeysError,
    NoSuchKeyError,
    NotInRegistryError,
    RegistryError,
    tier_with,
)
from ndif.stores.accounts.sql.accounts import SqlAccounts
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
from ndif.stores.accounts.sql.tables import METADATA, VERSION_TABLE
from tests.on_loop import on_loop
from tests.services.postgres import PostgresServer
from tests.stores.accounts.databases import FOREIGN, WITHOUT_USERS, TestDatabase
from tests.stores.accounts.databases import database as database
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

CACHE_S = 5.0


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(
    url: str, clock: Clock | None = None, wall: Callable[[], float] = time.time
) -> AsyncIterator[tuple[SqlRegistry, SqlAccounts]]:
    """Yield a registry and a server's accounts, with separate connections."""
    registry = SqlRegistry(Database(url))
    accounts = SqlAccounts(Database(url), CACHE_S, clock or Clock(), wall)
    await accounts.start()
    try:
        yield registry, accounts
    finally:
        await accounts.stop()
        await registry.close()


def imported(new: int, known: int) -> ImportedKeys:
    return ImportedKeys(imported=new, known=known)


# Keys


@on_loop
async def test_a_key_is_shown_once_and_stored_as_its_digest(database: TestDatabase) -> None:
    async with opened(database.url) as (registry, accounts):
        row = await registry.create_key("ada", "laptop")
        key = row.api_key
        assert len(key) == 48
        assert (row.user, row.name, row.state, row.tiers) == (
            "ada",
            "laptop",
            "VALID",
            [],
        )
        assert (await accounts.account(Caller(key))).user == "ada"
        stored = database.sql("SELECT * FROM ndif_keys")
        assert len(stored) == 1
        assert key not in stored[0]
        assert key.removeprefix("ndif_") not in stored[0]
        assert key not in repr(await registry.keys())
        # The id is not a key.
        with pytest.raises(NoSuchKeyError):
            await accounts.account(Caller(row.id))


@on_loop
async def test_revoked_key_is_rejected_after_cache_expires(
    database: TestDatabase,
) -> None:
    clock = Clock()
    async with opened(database.url, clock) as (registry, accounts):
        row = await registry.create_key("ada")
        key = row.api_key
        await accounts.account(Caller(key))
        first = await registry.revoke(row.id[:6])
        clock.now += CACHE_S - 0.1
        await accounts.account(Caller(key))
        clock.now += 0.2
        # A revoked key does not count as a guess.
        for _ in range(20):
            with pytest.raises(NoSuchKeyError, match="revoked"):
                await accounts.account(Caller(key))
        assert (await registry.revoke(row.id)) == first


@on_loop
async def test_expired_key_is_rejected_even_if_cached(
    database: TestDatabase,
) -> None:
    wall = Clock()
    async with opened(database.url, wall=wall) as (registry, accounts):
        row = await registry.create_key("ada", expires_at=wall.now + 60)
        key = row.api_key
        assert row.state == "EXPIRED"  # by the registry's own clock, half a century later
        wall.now += 59.9
        await accounts.account(Caller(key))
        wall.now += 0.1
        with pytest.raises(NoSuchKeyError, match="expired"):
            await accounts.account(Caller(key))


@on_loop
async def test_new_key_and_new_tier_take_effect_after_cache_expires(
    database: TestDatabase,
) -> None:
    clock = Clock()
    async with opened(database.url, clock) as (registry, accounts):
        await registry.create_tier(tier_with(["hotswapping"], "fast", weight=2, limits={"jobs": 3}))
        await registry.create_tier(tier_with([], "more", weight=1, limits={"jobs": 9, "bytes": 1}))
        await registry.create_tier(tier_with(["trusted"], "usual"))
        row = await registry.create_key("ada")
        key = row.api_key
        assert (await accounts.account(Caller(key))).limits == {}
        for tier in ("fast", "more", "usual", "fast"):
            row = await registry.assign(tier, row.id)
        assert row.tiers == ["fast", "more", "usual"]
        clock.now += CACHE_S
        account = await accounts.account(Caller(key))
        assert (account.hotswapping, account.trusted, account.priority) == (True, True, False)
        assert (account.weight, account.limits) == (2, {"jobs": 9, "bytes": 1})
        await registry.withdraw("usual", row.id)
        await registry.change_tier("fast", {"weight": 5.0, "limits": None})
        clock.now += CACHE_S
        account = await accounts.account(Caller(key))
        assert (account.trusted, account.weight, account.limits["jobs"]) == (False, 5, 9)


@on_loop
async def test_unknown_keys_are_cached(database: TestDatabase) -> None:
    clock = Clock()
    async with opened(database.url, clock) as (registry, accounts):
        await registry.create_key("ada")
        with pytest.raises(NoSuchKeyError):
            await accounts.account(Caller("unknown", "10.0.0.1"))
        await registry.import_keys([ImportedKey(_digest("unknown"), "bob")])
        with pytest.raises(NoSuchKeyError):
            await accounts.account(Caller("unknown", "10.0.0.2"))
        clock.now += CACHE_S
        assert (await accounts.account(Caller("unknown", "10.0.0.3"))).user == "bob"


@on_loop
async def test_account_cache_is_bounded(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/a.sqlite") as (registry, accounts):
        key = (await registry.create_key("ada")).api_key
        await accounts.account(Caller(key))
        for number in range(400):
            with contextlib.suppress(NoSuchKeyError):
                await accounts.account(Caller(f"guess-{number}", f"10.0.{number // 9}.1"))
        assert len(accounts._unknown) == 400
        most = 16_384
        for number in range(most + 10):
            accounts._unknown[str(number)] = None
        assert len(accounts._unknown) == most
        assert len(accounts._known) == 1  # guesses evict no known key


@on_loop
async def test_last_use_is_stored_in_batches(database: TestDatabase) -> None:
    async with opened(database.url) as (registry, accounts):
        keys = [await registry.create_key("ada", str(number)) for number in range(3)]
        for key in keys[:2]:
            await accounts.account(Caller(key.api_key))
        assert [row.last_used for row in await registry.keys()] == [None] * 3
        await accounts.store_uses()
        used = [row.last_used for row in await registry.keys()]
        assert used[2] is None
        assert all(abs(moment - time.time()) < 60 for moment in used[:2])
        (user,) = await registry.users()
        assert (user.keys, user.last_used) == (3, max(used[:2]))


@on_loop
async def test_concurrent_requests_query_database_once(database: TestDatabase) -> None:
    async with opened(database.url) as (registry, accounts):
        key = (await registry.create_key("ada")).api_key
        await accounts.account(Caller(key, "10.0.0.1"))
        accounts._known.clear()
        asked = 0
        read = accounts._read

        async def counted(digest: str, blinded: str):  # type: ignore[no-untyped-def]
            nonlocal asked
            asked += 1
            return await read(digest, blinded)

        accounts._read = counted  # type: ignore[method-assign]
        await asyncio.gather(*(accounts.account(Caller(key, "10.0.0.1")) for _ in range(50)))
        assert asked == 1


# Operators


@on_loop
async def test_missing_keys_tiers_and_users_are_reported(database: TestDatabase) -> None:
    async with opened(database.url) as (registry, _):
        await registry.create_tier(tier_with([], "fast"))
        row = await registry.create_key("ada", tiers=["fast"])
        for asking, expected in (
            (registry.key("zz"), "There is no key 'zz'"),
            (registry.key(""), "There is no key ''"),
            (registry.revoke("%"), "There is no key '%'"),
            (registry.create_key("ada", tiers=["slow"]), "There is no tier 'slow'"),
            (registry.assign("slow", row.id), "There is no tier 'slow'"),
            (registry.user("bob"), "There is no user 'bob'"),
        ):
            with pytest.raises(NotInRegistryError, match=expected):
                await asking
        with pytest.raises(RegistryError, match="There is a tier 'fast' already"):
            await registry.create_tier(tier_with([], "fast"))
        with pytest.raises(RegistryError, match="has 1 keys"):
            await registry.delete_tier("fast")
        await registry.withdraw("fast", row.id)
        await registry.delete_tier("fast")
        assert await registry.tiers() == []
        assert [row.id for row in await registry.keys()] == [row.id]  # failed creations left no key
        assert (await registry.user("ada")).keys[0].id == row.id


@on_loop
async def test_ambiguous_id_prefix_is_refused(database: TestDatabase) -> None:
    async with opened(database.url) as (registry, _):
        for _ in range(17):  # ids have sixteen possible first digits
            await registry.create_key("ada")
        begun = [row.id[0] for row in await registry.keys("ada")]
        twice = next(number for number in begun if begun.count(number) > 1)
        with pytest.raises(RegistryError, match="is the beginning of several ids"):
            await registry.revoke(twice)


@on_loop
async def test_keys_are_imported_only_once(database: TestDatabase) -> None:
    keys = [
        ImportedKey(_digest("first"), "ada", (tier_with(["hotswapping"], "hotswapping"),)),
        ImportedKey(_digest("second"), None, (tier_with([], "weight-2", weight=2),)),
    ]
    async with opened(database.url) as (registry, accounts):
        assert await registry.import_keys(keys) == imported(2, 0)
        assert await registry.import_keys(
            [*keys, ImportedKey(_digest("third"), "ada")]
        ) == imported(1, 2)
        assert (await accounts.account(Caller("first"))).hotswapping
        assert (await accounts.account(Caller("second"))).weight == 2
        await registry.change_tier("weight-2", {"trusted": True})
        other = ImportedKey(_digest("fourth"), "bob", (tier_with([], "weight-2", weight=2),))
        with pytest.raises(RegistryError, match="with other rights"):
            await registry.import_keys([ImportedKey(_digest("fifth"), "eve"), other])
        assert len(await registry.keys()) == 3  # imports are atomic
        assert [row.name for row in await registry.users()] == ["ada"]


_CREATES = """
import asyncio, sys
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
async def main():
    registry = SqlRegistry(Database(sys.argv[1]))
    for number in range(20):
        await registry.create_key("ada", f"{sys.argv[2]}-{number}")
    await registry.close()
asyncio.run(main())
"""


def test_concurrent_key_creation_loses_no_key(database: TestDatabase) -> None:
    """The first process makes the schema and the user."""
    started = [
        subprocess.Popen([sys.executable, "-c", _CREATES, database.url, str(number)])
        for number in range(3)
    ]
    assert [process.wait(PATIENCE_S) for process in started] == [0, 0, 0]
    assert database.sql("SELECT count(*) FROM ndif_keys") == ["60"]
    assert database.sql("SELECT count(*) FROM ndif_users") == ["1"]


# Migrations


@on_loop
async def test_repeated_migration_keeps_data(database: TestDatabase) -> None:
    async with opened(database.url) as (registry, _):
        await registry.create_tier(tier_with([], "fast"))
        await registry.create_key("ada", tiers=["fast"])
        connected = Database(database.url)
        assert await connected.check() == "ours"
        await connected.migrate()  # the second migration does nothing
        assert len(await registry.keys()) == 1
        await connected.close()


@on_loop
async def test_migrations_produce_declared_tables(database: TestDatabase) -> None:
    def differences(connection: Connection) -> list[object]:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        return list(
            compare_metadata(MigrationContext.configure(connection, opts=options), METADATA)
        )

    connected = Database(database.url)
    await connected.migrate()
    async with connected.reading() as connection:
        assert await connection.run_sync(differences) == []
    await connected.close()


@on_loop
async def test_schema_of_newer_ndif_is_refused(database: TestDatabase) -> None:
    connected = Database(database.url)
    await connected.migrate()
    database.sql("UPDATE ndif_schema SET version_num = '9999'")
    with pytest.raises(KeysError, match="made by another version of ndif"):
        await connected.migrate()
    await connected.close()


@on_loop
async def test_database_file_is_readable_only_by_owner(tmp_path: Path) -> None:
    file = tmp_path / "new" / "accounts.sqlite"
    async with opened(f"sqlite:///{file}") as (registry, accounts):
        # A lookup does not create the file.
        with pytest.raises(AccountsUnavailableError):
            await accounts.account(Caller("a-key"))
        assert not file.exists()
        await registry.create_key("ada")
        modes = {stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
        assert modes == {0o600}


# Another NDIF server's tables


@on_loop
async def test_foreign_database_is_served_unchanged_and_can_be_copied(
    database: TestDatabase,
) -> None:
    database.sql(FOREIGN)
    clock = Clock()
    async with opened(database.url, clock) as (registry, accounts):
        ada = await accounts.account(Caller("11111111-aaaa"))
        assert (ada.user, ada.hotswapping, ada.trusted) == ("ada@example.org", True, False)
        bob = await accounts.account(Caller("22222222-bbbb"))
        assert (bob.email, bob.hotswapping) == (None, False)
        # No foreign tier name grants trust.
        assert not (await accounts.account(Caller("33333333-cccc"))).trusted
        with pytest.raises(NoSuchKeyError):
            await accounts.account(Caller("11111111-aaab"))
        for asking in (registry.keys(), registry.create_key("eve"), registry.tiers()):
            with pytest.raises(RegistryError, match="`ndif keys migrate` copies"):
                await asking
        await accounts.store_uses()
        with pytest.raises((AssertionError, sqlite3.Error), match="ndif_keys"):  # no such table
            database.sql("SELECT count(*) FROM ndif_keys")
        database.sql("DELETE FROM keys WHERE key_id = '22222222-bbbb'")
        clock.now += CACHE_S
        with pytest.raises(NoSuchKeyError):
            await accounts.account(Caller("22222222-bbbb"))
        # Copied keys keep working, without a restart.
        assert await registry.copy_foreign() == imported(2, 0)
        clock.now += CACHE_S
        assert await accounts.account(Caller("11111111-aaaa")) == ada
        assert await registry.copy_foreign() == imported(0, 2)
        key = (await registry.create_key("eve")).api_key
        assert (await accounts.account(Caller(key))).user == "eve"
        assert database.sql("SELECT count(*) FROM keys") == ["2"]
        assert {row.name for row in await registry.tiers()} == {
            "tier_hotswap",
            "trusted-partner",
        }


@on_loop
async def test_foreign_database_needs_no_users_table(database: TestDatabase) -> None:
    database.sql(WITHOUT_USERS)
    async with opened(database.url) as (_, accounts):
        account = await accounts.account(Caller("44444444-dddd"))
        assert account.hotswapping
        assert account.email is None


@on_loop
async def test_foreign_database_needs_only_read_access(postgres: PostgresServer) -> None:
    url = postgres.database()
    postgres.sql(url, FOREIGN)
    postgres.sql(
        url,
        "CREATE ROLE reader LOGIN PASSWORD 'only'; GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader",
    )
    reader = postgres.url(url.rpartition("/")[2], "reader", "only")
    async with opened(reader) as (_, accounts):
        assert (await accounts.account(Caller("11111111-aaaa"))).hotswapping


@on_loop
async def test_foreign_tables_of_unknown_form_admit_nobody(database: TestDatabase) -> None:
    database.sql(
        "CREATE TABLE keys (key_id VARCHAR(64)); CREATE TABLE tiers (id INTEGER);"
        "CREATE TABLE key_tier_assignments (key_id VARCHAR(64), tier INTEGER);"
        "INSERT INTO keys VALUES ('11111111-aaaa')"
    )
    async with opened(database.url) as (registry, accounts):
        with pytest.raises(AccountsUnavailableError, match="has no column tier_id"):
            await accounts.account(Caller("11111111-aaaa"))
        with pytest.raises(KeysError, match="has no column tier_id"):
            await registry.copy_foreign()


@on_loop
async def test_copy_without_foreign_tables_is_refused(database: TestDatabase) -> None:
    async with opened(database.url) as (registry, _):
        await registry.create_key("ada")
        with pytest.raises(RegistryError, match="there is nothing to copy"):
            await registry.copy_foreign()


# An unavailable database


@on_loop
async def test_only_cached_keys_are_admitted_while_database_is_unavailable() -> None:
    clock = Clock()
    with PostgresServer() as server:
        async with opened(server.database(), clock) as (registry, accounts):
            key = (await registry.create_key("ada")).api_key
            other = (await registry.create_key("bob")).api_key
            await accounts.account(Caller(key))
            server.stop()
            await accounts.account(Caller(key))  # remembered
            with pytest.raises(AccountsUnavailableError):
                await accounts.account(Caller(other))
            with pytest.raises(AccountsUnavailableError):
                await accounts.ping()
            clock.now += CACHE_S
            for api_key in (key, other, "a-guess"):
                with pytest.raises(AccountsUnavailableError) as away:
                    await accounts.account(Caller(api_key))
                assert "p@ss" not in str(away.value)
            with pytest.raises(AccountsUnavailableError):
                await accounts.store_uses()
            # Lookups during an outage do not count as guesses, and last uses are stored later.
            server.start()
            clock.now += CACHE_S
            for api_key in (key, other):
                await accounts.account(Caller(api_key))
            await accounts.store_uses()
            assert all(row.last_used for row in await registry.keys())


@on_loop
async def test_unusable_database_error_gives_reason_without_secrets(
    postgres: PostgresServer,
) -> None:
    url = postgres.database()
    name = url.rpartition("/")[2]
    for broken, expected in (
        (postgres.url(name, password="wrong"), "password authentication failed"),
        (postgres.url("none"), 'database "none" does not exist'),
        ("postgresql://u:secret@127.0.0.1:1/d", "127.0.0.1:1/d"),
        ("sqlite:////proc/none/a.sqlite", "/proc/none"),
    ):
        connected = Database(broken)
        with pytest.raises((KeysError, AccountsUnavailableError), match=expected) as problem:
            await (connected.migrate() if connected.is_sqlite else connected.check())
        assert "wrong" not in str(problem.value)
        assert "secret" not in str(problem.value)
        await connected.close()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
