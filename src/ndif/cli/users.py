"""`ndif users`: those who have API keys."""

from __future__ import annotations

import click

from ndif.cli.accounts_client import AccountsClient, with_accounts
from ndif.cli.keys import ago, keys_table
from ndif.cli.output import console, elapsed, show_json, table
from ndif.schema.account import AccountUsers, UserWithKeys


@click.group("users")
def command() -> None:
    """Show the users who have API keys. `ndif keys create --user NAME` adds one."""


@command.command("list")
@with_accounts
def list_users(accounts: AccountsClient, as_json: bool) -> None:
    """Show all users."""
    answer = accounts.get(AccountUsers, "users")
    if as_json:
        show_json(answer)
        return
    rows = (
        (user.name, user.keys, ago(user.last_used), elapsed(user.created)) for user in answer.users
    )
    console().print(table("Users", ("user", "keys", "last used", "known for"), rows))


@command.command("show")
@click.argument("user")
@with_accounts
def show(accounts: AccountsClient, as_json: bool, user: str) -> None:
    """Show one user's keys."""
    answer = accounts.get(UserWithKeys, "users/show", user=user)
    if as_json:
        show_json(answer)
    else:
        console().print(keys_table(answer.keys))
