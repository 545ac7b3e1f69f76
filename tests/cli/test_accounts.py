"""`ndif keys`, `ndif tiers` and `ndif users`, through a remote server and directly on the database."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import httpx
import pytest

from ndif.cli.main import cli
from ndif.stores.accounts.sql.accounts import SqlAccounts
from ndif.stores.accounts.sql.database import Database
from tests.cli.operations import TOKEN, Table, application
from tests.serving import serving
from tests.stores.accounts.databases import FOREIGN, TestDatabase, sqlite_database
from tests.stores.accounts.databases import database as database

pytestmark = pytest.mark.engine

Result = click.testing.Result
Ndif = Callable[..., Result]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no server runs."""
    monkeypatch.setenv("NDIF_SESSION_ROOT", str(tmp_path / "sessions"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture(params=["by the server", "on the database"])
def ndif(
    request: pytest.FixtureRequest,
    here: Path,
    database: TestDatabase,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Ndif]:
    """A command, run through a server or directly on the database."""
    if request.param == "on the database":
        monkeypatch.setenv("NDIF_DATABASE_URL", database.url)
        yield invoke
        return
    with serving(application(Table(), accounts=SqlAccounts(Database(database.url), 5))) as url:
        yield lambda *arguments: invoke(*arguments, "--url", url, "--token", TOKEN)


def invoke(*arguments: str | Path) -> Result:
    result = click.testing.CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def printed(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr


def test_key_is_created_shown_and_revoked(ndif: Ndif, database: TestDatabase) -> None:
    assert ndif("tiers", "create", "fast", "--hotswapping", "--weight", "2").stdout == (
        "Tier fast is created.\n"
    )
    created = ndif("keys", "create", "--user", "ada", "--name", "laptop", "--tier", "fast")
    assert created.exit_code == 0, created.output
    assert " of ada is created. It cannot be shown again:\n" in created.stdout
    key = created.stdout.partition("export NDIF_API_KEY=")[2].split()[0]
    assert database.sql("SELECT digest FROM ndif_keys") == [
        hashlib.sha256(key.encode()).hexdigest()
    ]
    (row,) = printed(ndif("keys", "list", "--json"))["keys"]
    assert (row["user"], row["name"], row["tiers"]) == ("ada", "laptop", ["fast"])
    shown = ndif("keys", "list").stdout
    assert row["id"] in shown
    assert key not in shown
    short = row["id"][:5]
    assert printed(ndif("keys", "show", short, "--json")) == row
    first, *more = ndif("keys", "revoke", short).stdout.splitlines()
    assert first == f"Key {row['id']} of ada is revoked."
    assert all("No server runs on this machine to end the key's jobs" in line for line in more)
    assert "REVOKED" in ndif("keys", "show", short).stdout
    assert printed(ndif("keys", "list", "--user", "bob", "--json")) == {"keys": []}


def test_key_has_expiry(ndif: Ndif) -> None:
    row = printed(ndif("keys", "create", "--expires", "30d", "--json"))
    assert row["expires"] - row["created"] == pytest.approx(30 * 86400, abs=5)
    assert row["user"] is None
    assert len(row["api_key"]) == 48
    assert "must be more than" in error(ndif("keys", "create", "--expires", "0s"), 2)


def test_tiers_are_changed_and_assigned(ndif: Ndif) -> None:
    key = printed(ndif("keys", "create", "--user", "ada", "--json"))["id"]
    other = printed(ndif("keys", "create", "--user", "ada", "--json"))["id"]
    for tier in ("a", "b"):
        assert ndif("tiers", "create", tier).exit_code == 0
    limits = json.dumps({"unfinished_jobs": 3})
    changed = printed(ndif("tiers", "change", "a", "--trusted", "--limits", limits, "--json"))
    assert changed == {
        "name": "a",
        "gated": False,
        "hotswapping": False,
        "priority": False,
        "trusted": True,
        "weight": 1.0,
        "limits": {"unfinished_jobs": 3},
        "keys": 0,
    }
    assert ndif("tiers", "assign", "a", key, other).stdout == (
        f"Key {key} has a.\nKey {other} has a.\n"
    )
    assert printed(ndif("tiers", "assign", "b", key, "--json"))["keys"][0]["tiers"] == ["a", "b"]
    assert ndif("tiers", "withdraw", "b", key).stdout == f"Key {key} has a.\n"
    assert ndif("tiers", "withdraw", "a", other).stdout == f"Key {other} has no tier.\n"
    cleared = printed(ndif("tiers", "change", "a", "--no-trusted", "--limits", "{}", "--json"))
    assert (cleared["trusted"], cleared["limits"], cleared["keys"]) == (False, None, 1)
    assert "has 1 keys" in error(ndif("tiers", "delete", "a"), 5)
    assert ndif("tiers", "delete", "b").stdout == "Tier b is deleted.\n"
    assert "trusted" not in ndif("tiers", "list").stdout
    assert [tier["name"] for tier in printed(ndif("tiers", "list", "--json"))["tiers"]] == ["a"]


def test_users_command_lists_key_owners(ndif: Ndif) -> None:
    for user in ("ada", "bob", "ada"):
        assert ndif("keys", "create", "--user", user).exit_code == 0
    users = printed(ndif("users", "list", "--json"))["users"]
    assert [(user["name"], user["keys"]) for user in users] == [("ada", 2), ("bob", 1)]
    assert "never" in ndif("users", "list").stdout
    assert len(printed(ndif("users", "show", "ada", "--json"))["keys"]) == 2
    assert "ada" in ndif("users", "show", "ada").stdout


def test_keys_import_reads_key_file_once(ndif: Ndif, here: Path) -> None:
    file = here / "keys.yaml"
    file.write_text(
        "keys:\n- {key: the-key-of-ada, user: ada, tags: [priority, hotswapping], weight: 2}\n"
        f"- {{sha256: {hashlib.sha256(b'bob').hexdigest()}}}\n"
    )
    assert ndif("keys", "import", file).stdout == "2 keys are imported.\n"
    again = ndif("keys", "import", file).stdout
    assert again == "0 keys are imported; 2 already existed.\n"
    (tier,) = printed(ndif("tiers", "list", "--json"))["tiers"]
    assert tier["name"] == "hotswapping-priority-weight-2"
    assert (tier["hotswapping"], tier["priority"], tier["weight"]) == (True, True, 2)
    assert "No such file" in error(ndif("keys", "import", here / "none.yaml"), 1)


def test_keys_migrate_copies_keys_of_foreign_database(ndif: Ndif, database: TestDatabase) -> None:
    database.sql(FOREIGN)
    assert "`ndif keys migrate` copies" in error(ndif("keys", "create"), 5)
    assert ndif("keys", "migrate").stdout == "3 keys are imported.\n"
    assert ndif("keys", "create").exit_code == 0
    assert len(printed(ndif("keys", "list", "--json"))["keys"]) == 4


def test_commands_name_missing_or_invalid_argument(ndif: Ndif) -> None:
    for arguments in (
        ("keys", "show", "ff"),
        ("keys", "revoke", "ff"),
        ("tiers", "assign", "a", "ff"),
        ("users", "show", "eve"),
    ):
        assert "There is no " in error(ndif(*arguments), 4)
    for arguments, expected in (
        (("tiers", "create", "a\nb"), "tier: "),
        (("keys", "create", "--user", "x" * 400), "user: "),
        (("tiers", "create", "x" * 100), "tier: "),
    ):
        assert expected in error(ndif(*arguments), 5)
    assert "not a JSON object" in error(ndif("tiers", "create", "a", "--limits", "3"), 2)


@pytest.mark.parametrize(
    "command",
    [
        ("keys", "list"),
        ("keys", "show", "ff"),
        ("keys", "revoke", "ff"),
        ("tiers", "list"),
        ("tiers", "assign", "a", "ff"),
        ("users", "list"),
    ],
    ids=" ".join,
)
def test_commands_that_add_nothing_create_no_database(here: Path, command: tuple[str, ...]) -> None:
    root = here / "sessions"
    message = error(invoke(*command), 4)
    assert f"There is no database of API keys at {root / 'accounts.sqlite'}" in message
    assert "NDIF_SESSION_ROOT" in message
    assert not root.exists()


def test_first_key_creates_database(here: Path) -> None:
    assert invoke("keys", "create", "--user", "ada").exit_code == 0
    assert len(printed(invoke("keys", "list", "--json"))["keys"]) == 1


def test_keys_list_fails_without_database(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_DEV_MODE", "true")
    assert "has no database of API keys" in error(invoke("keys", "list"), 5)
    with serving(application(Table())) as url:
        message = error(invoke("keys", "list", "--url", url, "--token", TOKEN), 5)
        assert "has no database of API keys" in message


def test_unavailable_database_is_reported_without_password(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDIF_DATABASE_URL", "postgresql://u:secret@127.0.0.1:1/d")
    message = error(invoke("keys", "list"), 1)
    assert "database of API keys is unavailable" in message
    assert "secret" not in message


def test_account_routes_need_token_and_reject_bad_bodies(tmp_path: Path) -> None:
    accounts = SqlAccounts(Database(sqlite_database(tmp_path / "a.sqlite").url), 5)
    with serving(application(Table(), accounts=accounts)) as url, httpx.Client() as client:
        assert client.get(f"{url}/admin/keys").status_code == 401
        assert client.post(f"{url}/admin/keys/create", json={}).status_code == 401
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        assert client.get(f"{url}/admin/keys").status_code == 404
        assert client.post(f"{url}/admin/keys/create", json={}).status_code == 200
        assert len(client.get(f"{url}/admin/keys").json()["keys"]) == 1
        assert client.post(f"{url}/admin/keys").status_code == 405
        for path, body in (
            ("keys/create", b"{"),
            ("keys/create", b"[]"),
            ("keys/create", b'{"user": 3}'),
            ("keys/create", b'{"expires_in_s": 1e400}'),
            ("keys/create", b'{"user": "\\u0000"}'),
            ("keys/import", b'{"keys": [{"sha256": "x"}]}'),
            ("tiers/create", b'{"tier": "a", "weight": 0}'),
        ):
            answer = client.post(f"{url}/admin/{path}", content=body)
            assert (answer.status_code, set(answer.json())) == (400, {"detail"}), (path, body)
        assert client.get(f"{url}/admin/keys?colour=red").status_code == 400
