"""Properties of every form of accounts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from ndif.config.settings import Settings
from ndif.stores.accounts import (
    Accounts,
    Caller,
    FileAccounts,
    ImportedKey,
    KeysError,
    NoSuchKeyError,
    OpenAccounts,
    TooManyGuessesError,
    contradiction,
    database_url,
    may_trust,
    open_accounts,
    tier_with,
)
from ndif.stores.accounts.sql.accounts import SqlAccounts
from ndif.stores.accounts.sql.database import Database
from ndif.stores.accounts.sql.registry import SqlRegistry
from tests.on_loop import on_loop
from tests.stores.accounts.databases import database as database

pytestmark = pytest.mark.process

FORMS = ("file", "sqlite", "postgres")
ADA, BOB, ANA = "a-key-of-ada", "a-key-of-bob", "another-of-ada"
Served = Callable[[], AbstractAsyncContextManager[Accounts]]


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(params=FORMS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Served:
    """Accounts with three keys, two of them of one user."""
    if request.param == "file":
        path = tmp_path / "keys.yaml"
        path.write_text(
            f"keys:\n- {{key: {ADA}, user: ada@x.org, tags: [hotswapping, trusted], weight: 3}}\n"
            f"- {{sha256: {digest(BOB)}, tags: [priority]}}\n- {{key: {ANA}, user: ada@x.org}}\n"
        )

        @asynccontextmanager
        async def of_file() -> AsyncIterator[Accounts]:
            accounts = FileAccounts(path)
            await accounts.start()
            yield accounts
            await accounts.stop()

        return of_file
    url = (
        f"sqlite:///{tmp_path}/accounts.sqlite"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres").database()
    )

    @asynccontextmanager
    async def of_database() -> AsyncIterator[Accounts]:
        accounts = SqlAccounts(Database(url), 5)
        registry = SqlRegistry(Database(url))
        fast = tier_with(["hotswapping"], "fast", weight=0.5)
        strong = tier_with(["trusted"], "strong", weight=3)
        await registry.import_keys(
            [
                ImportedKey(digest(ADA), "ada@x.org", (fast, strong)),
                ImportedKey(digest(BOB), None, (tier_with(["priority"], "first"),)),
                ImportedKey(digest(ANA), "ada@x.org"),
            ]
        )
        await registry.close()
        await accounts.start()
        yield accounts
        await accounts.stop()

    return of_database


@on_loop
async def test_available_account_store_answers_ping(served: Served) -> None:
    async with served() as accounts:
        await accounts.ping()


@on_loop
async def test_key_determines_user_and_rights(served: Served) -> None:
    async with served() as accounts:
        ada = await accounts.account(Caller(ADA, "10.0.0.1"))
        assert (ada.user, ada.email, ada.weight) == ("ada@x.org", "ada@x.org", 3)
        assert (ada.hotswapping, ada.trusted, ada.priority) == (True, True, False)
        assert (ada.tags, ada.limits) == (["hotswapping", "trusted"], {})
        bob = await accounts.account(Caller(BOB))
        assert (bob.hotswapping, bob.trusted, bob.priority) == (False, False, True)
        assert (bob.email, bob.weight) == (None, 1)
        # User names are equal in every form, so that users find old results after a change of form.
        assert bob.user == f"key {digest(digest(BOB))[:16]}"
        assert ada.key == digest(f"ndif runner {digest(ADA)}")[:32]


@on_loop
async def test_two_keys_of_one_user_give_same_user(served: Served) -> None:
    async with served() as accounts:
        first, second = [await accounts.account(Caller(key)) for key in (ADA, ANA)]
        assert first.user == second.user
        assert first.key != second.key
        assert (second.hotswapping, second.weight) == (False, 1)


@on_loop
async def test_unknown_keys_are_rejected(served: Served) -> None:
    async with served() as accounts:
        others = (
            "",
            "somebody-elses",
            f"{ADA} ",
            ADA[:-1],
            ADA.upper(),
            digest(ADA),
            "\udcff\x00'",
        )
        for number, unknown in enumerate(others):
            with pytest.raises(NoSuchKeyError, match="operator"):
                await accounts.account(Caller(unknown, f"10.0.0.{number}"))


@on_loop
async def test_guesses_are_rate_limited_even_if_concurrent(served: Served) -> None:
    async with served() as accounts:
        assert (await accounts.account(Caller(BOB, "10.0.0.1"))).priority
        answers = await asyncio.gather(
            *(accounts.account(Caller(f"guess-{n}", "10.0.0.1")) for n in range(100)),
            return_exceptions=True,
        )
        assert sum(isinstance(answer, NoSuchKeyError) for answer in answers) == 10
        assert sum(isinstance(answer, TooManyGuessesError) for answer in answers) == 90
        with pytest.raises(TooManyGuessesError):
            await accounts.account(Caller(ADA, "10.0.0.1"))
        # Keys already used from that address still work, and other addresses are not limited.
        assert (await accounts.account(Caller(BOB, "10.0.0.1"))).priority
        assert (await accounts.account(Caller(ADA, "10.0.0.2"))).hotswapping


# Servers without keys


@on_loop
async def test_open_accounts_admit_everyone_and_distinguish_hosts() -> None:
    accounts = OpenAccounts(hotswapping=True)
    first, second = (
        await accounts.account(Caller("", "10.0.0.1")),
        await accounts.account(Caller("", "10.0.0.2")),
    )
    assert first.user != second.user
    assert first.hotswapping
    assert not first.trusted
    assert not (await OpenAccounts(hotswapping=False).account(Caller())).hotswapping


# The choice of a form


def test_settings_choose_form_of_accounts(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []")
    assert isinstance(open_accounts(Settings(dev_mode=True)), OpenAccounts)
    assert isinstance(open_accounts(Settings(api_keys=keys)), FileAccounts)
    for options in (
        {"database_url": f"sqlite:///{tmp_path}/a.sqlite"},
        {"database_url": "postgres://u:p@db.example.org/ndif?sslmode=require"},
        {"POSTGRES_HOST": "db.example.org"},
    ):
        assert isinstance(open_accounts(Settings(**options)), SqlAccounts)  # type: ignore[arg-type]


def test_postgres_variables_make_database_url() -> None:
    settings = Settings(  # type: ignore[call-arg]
        POSTGRES_HOST="::1",
        POSTGRES_PORT=6543,
        POSTGRES_DB="accounts",
        POSTGRES_USER="ann@x",
        POSTGRES_PASSWORD="p:@/%",
    )
    url = database_url(settings)
    assert url == "postgresql://ann%40x:p%3A%40%2F%25@[::1]:6543/accounts"
    assert Database(url).name == "::1:6543/accounts"
    assert "p:@/%" not in repr(settings)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, None),
        ({"dev_mode": True}, None),
        ({"dev_mode": True, "api_keys": "keys.yaml"}, "NDIF_DEV_MODE and NDIF_API_KEYS"),
        ({"database_url": "x", "POSTGRES_HOST": "y"}, "NDIF_DATABASE_URL and POSTGRES_HOST"),
        ({"broker_url": "redis://127.0.0.1:6379"}, None),
        ({"broker_url": "redis://10.0.0.1:6379", "dev_mode": True}, None),
        # A password alone selects no form: it may belong to another program.
        ({"POSTGRES_PASSWORD": "x", "api_keys": "keys.yaml"}, None),
    ],
)
def test_two_forms_of_accounts_contradict_each_other(
    options: dict[str, object], named: str | None
) -> None:
    message = contradiction(Settings(**options))  # type: ignore[arg-type]
    if named is None:
        assert message is None
    else:
        assert message is not None
        assert message.startswith(f"{named} contradict each other")


def test_servers_on_several_machines_need_shared_accounts() -> None:
    message = contradiction(Settings(broker_url="rediss://:secret@10.0.0.1:6379/0"))
    assert message is not None
    assert "NDIF_DATABASE_URL or POSTGRES_HOST" in message
    assert "secret" not in message


def test_default_accounts_are_beside_sessions(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "a%20b?c#d"):
        url = database_url(Settings(session_root=folder))
        assert url is not None
        assert isinstance(open_accounts(Settings(session_root=folder)), SqlAccounts)
    assert Database(f"sqlite:///{tmp_path}/a%20b.sqlite").name == f"{tmp_path}/a%20b.sqlite"


@pytest.mark.parametrize(
    "url",
    ["accounts.sqlite", "mysql://h/d", "sqlite://", "sqlite:///:memory:", "postgresql://h:x/d"],
)
def test_invalid_database_url_is_refused(url: str) -> None:
    with pytest.raises(KeysError, match="NDIF_DATABASE_URL"):
        Database(url)


@on_loop
async def test_may_trust_is_true_if_a_tier_is_trusted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.sqlite"
    settings = Settings(database_url=url)  # type: ignore[arg-type]
    assert not may_trust(settings)  # there is no tier yet
    registry = SqlRegistry(Database(url))
    await registry.create_tier(tier_with([], "plain"))
    assert not may_trust(settings)
    await registry.create_tier(tier_with(["trusted"], "partner"))
    assert may_trust(settings)
    await registry.close()
    assert may_trust(Settings(POSTGRES_HOST="db.example.org"))  # type: ignore[call-arg]
    assert not may_trust(Settings(dev_mode=True))
