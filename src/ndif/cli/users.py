"""`ndif users`: those who have API keys."""

from __future__ import annotations

import click

from ndif.cli.accounts_client import AccountsClient, with_accounts
from ndif.cli.keys import keys_table
from ndif.cli.output import elapsed, show, table


@click.group("users")
def command() -> None:
    """Show the users who have API keys. `ndif keys create --user NAME` adds one."""


@command.command("list")
@with_accounts
def list_users(accounts: AccountsClient, as_json: bool) -> None:
    """Show all users."""
    answer = accounts.get("users")
    rows = (
        (user["name"], user["keys"], _ago(user["last_used"]), elapsed(user["created"]))
        for user in answer["users"]
    )
    headings = ("user", "keys", "last used", "known for")
    show(answer, as_json, lambda _: table("Users", headings, rows))


@command.command("show")
@click.argument("user")
@with_accounts
def show_one(accounts: AccountsClient, as_json: bool, user: str) -> None:
    """Show one user's keys."""
    show(accounts.get("users/show", user=user), as_json, keys_table)


def _ago(moment: float | None) -> str:
    return "never" if moment is None else f"{elapsed(moment)} ago"
