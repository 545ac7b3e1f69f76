"""`ndif keys`: the API keys in the server's database."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.accounts_client import AccountsClient, with_accounts
from ndif.cli.durations import DurationParam
from ndif.cli.output import duration, elapsed, show, show_answer, table

if TYPE_CHECKING:
    from rich.table import Table

    from ndif.schema.account import (
        ApiKey,
        ApiKeys,
        ImportedKeys,
        UserWithKeys,
    )
    from ndif.stores.accounts.file import KeyEntry

_BATCH = 5000
"""Number of keys that one transaction imports."""


@click.group("keys")
def command() -> None:
    """Create, list and revoke API keys.

    The command uses the server of this machine or of --url. If none runs on this machine, it opens the
    database itself. KEY is the id of a key, as `ndif keys list` shows it, or a unique prefix.
    """


@command.command("create")
@click.option("--user", metavar="NAME", help="User of the key, such as an e-mail address.")
@click.option("--name", default="", help="Label of the key.")
@click.option(
    "--expires",
    type=DurationParam(is_open=True),
    metavar="DURATION",
    help="Time until the key expires, such as 30d.",
)
@click.option("--tier", "tiers", multiple=True, metavar="TIER", help="Tier of the key; repeatable.")
@with_accounts
def create(
    accounts: AccountsClient,
    as_json: bool,
    user: str | None,
    name: str,
    expires: float | None,
    tiers: tuple[str, ...],
) -> None:
    """Create a key and print it. The key cannot be shown again."""
    from ndif.schema.account import NewApiKey

    fields = {"user": user, "label": name, "expires_in_s": expires, "tiers": list(tiers)}
    answer = accounts.post(NewApiKey, "keys/create", **fields)
    lines = [
        f"{_label(answer)} is created. It cannot be shown again:",
        "",
        f"    export NDIF_API_KEY={answer.api_key}",
        "",
    ]
    show_answer(answer, as_json, lines)


@command.command("list")
@click.option("--user", metavar="NAME", help="Only the keys of this user.")
@with_accounts
def list_keys(accounts: AccountsClient, as_json: bool, user: str | None) -> None:
    """Show all keys, without their secrets."""
    from ndif.schema.account import ApiKeys

    show(accounts.get(ApiKeys, "keys", user=user), as_json, keys_table)


@command.command("show")
@click.argument("key")
@with_accounts
def show_one(accounts: AccountsClient, as_json: bool, key: str) -> None:
    """Show one key."""
    from ndif.schema.account import ApiKey, ApiKeys

    answer = accounts.get(ApiKey, "keys/show", key=key)
    show(answer, as_json, lambda api_key: keys_table(ApiKeys(keys=[api_key])))


@command.command("revoke")
@click.argument("key")
@with_accounts
def revoke(accounts: AccountsClient, as_json: bool, key: str) -> None:
    """Revoke a key permanently, and end its waiting and running jobs.

    The revocation takes effect within NDIF_ACCOUNTS_CACHE_S.
    """
    from ndif.schema.account import RevokedApiKey

    answer = accounts.post(RevokedApiKey, "keys/revoke", key=key)
    lines = [f"{_label(answer)} is revoked."]
    if not accounts.asks_a_server:
        lines.append(
            "No server runs on this machine to end the key's jobs: jobs that wait elsewhere will run."
        )
    elif killed := answer.killed:
        lines.append(
            "One job of the key is ended."
            if killed == 1
            else f"{killed} jobs of the key are ended."
        )
    show_answer(answer, as_json, lines)


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@with_accounts
def import_keys(accounts: AccountsClient, as_json: bool, file: Path) -> None:
    """Add the keys in FILE, a YAML file in the format of NDIF_API_KEYS, to the database.

    The keys stay valid for their users. Tags and weights become tiers.
    """
    from ndif.schema.account import ImportedKeys
    from ndif.stores.accounts import read_keys

    entries = read_keys(file.expanduser())
    answer = ImportedKeys(imported=0, known=0)
    for start in range(0, len(entries), _BATCH):
        keys = [_fields(entry) for entry in entries[start : start + _BATCH]]
        more = accounts.post(ImportedKeys, "keys/import", keys=keys)
        answer = ImportedKeys(
            imported=answer.imported + more.imported, known=answer.known + more.known
        )
    show_answer(answer, as_json, [_import_sentence(answer)])


@command.command("migrate")
@with_accounts
def migrate(accounts: AccountsClient, as_json: bool) -> None:
    """Copy the keys of another NDIF server from its tables in the same database.

    The other tables stay unchanged, and this server does not read them again.
    """
    from ndif.schema.account import ImportedKeys

    answer = accounts.post(ImportedKeys, "keys/migrate")
    show_answer(answer, as_json, [_import_sentence(answer)])


def keys_table(answer: ApiKeys | UserWithKeys) -> Table:
    """Return the table of an answer's keys."""
    headings = ("id", "user", "name", "tiers", "state", "expires in", "last used", "age")
    return table("Keys", headings, _rows(answer.keys))


def _rows(keys: Iterable[ApiKey]) -> Iterator[tuple[object, ...]]:
    for key in keys:
        yield (
            key.id,
            key.user,
            key.name,
            ", ".join(key.tiers),
            key.state,
            duration(None if key.expires is None else key.expires - time.time()),
            ago(key.last_used),
            elapsed(key.created),
        )


def ago(moment: float | None) -> str:
    """Format how long ago a key was used."""
    return "never" if moment is None else f"{elapsed(moment)} ago"


def _label(key: ApiKey) -> str:
    return f"Key {key.id}" + (f" of {key.user}" if key.user else "")


def _import_sentence(answer: ImportedKeys) -> str:
    existing = f"; {answer.known} already existed" if answer.known else ""
    return f"{answer.imported} keys are imported{existing}."


def _fields(entry: KeyEntry) -> dict[str, Any]:
    tier = entry.tier
    rights = dict.fromkeys(tier.rights, True)
    tier_fields = {"tier": tier.name, "weight": tier.weight, **rights} if tier.name else None
    return {"sha256": entry.digest, "user": entry.user, "tier": tier_fields}
