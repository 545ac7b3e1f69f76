"""`ndif users`: the users of API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ndif.cli.accounts_client import AccountsClient, with_accounts
from ndif.cli.keys import ago, keys_table
from ndif.cli.output import elapsed, show, table

if TYPE_CHECKING:
    from rich.table import Table

    from ndif.schema.account import AccountUsers


@click.group("users")
def command() -> None:
    """Show the users of API keys. `ndif keys create --user NAME` adds a user."""


@command.command("list")
@with_accounts
def list_users(accounts: AccountsClient, as_json: bool) -> None:
    """Show all users."""
    from ndif.schema.account import AccountUsers

    show(accounts.get(AccountUsers, "users"), as_json, _rendered)


@command.command("show")
@click.argument("user")
@with_accounts
def show_one(accounts: AccountsClient, as_json: bool, user: str) -> None:
    """Show one user's keys."""
    from ndif.schema.account import UserWithKeys

    show(accounts.get(UserWithKeys, "users/show", user=user), as_json, keys_table)


def _rendered(answer: AccountUsers) -> Table:
    rows = (
        (user.name, user.keys, ago(user.last_used), elapsed(user.created)) for user in answer.users
    )
    return table("Users", ("user", "keys", "last used", "age"), rows)
