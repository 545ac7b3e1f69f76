"""`ndif admin`: the operator's password for the web page."""

from __future__ import annotations

import sys

import click

from ndif.cli.output import show_answer
from ndif.cli.server_client import CommandError, json_option

SHORTEST = 12
"""Minimum length of a password."""
_MAX_LENGTH = 1024


@click.group("admin")
def command() -> None:
    """Make the operator's password for the web page."""


@command.command("password")
@json_option
def password(as_json: bool) -> None:
    """Read a password from the terminal or standard input, and print its hash as a variable.

    Set the variable in the environment of `ndif start`, on every machine that runs gateways. A new hash
    ends all logins with the earlier password.
    """
    if sys.stdin.isatty():
        given = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        given = sys.stdin.readline(_MAX_LENGTH + 2).rstrip("\r\n")
    if not SHORTEST <= len(given) <= _MAX_LENGTH:
        raise CommandError(
            f"A password must have {SHORTEST} to {_MAX_LENGTH} characters. A few words are enough."
        )
    from argon2 import PasswordHasher

    from ndif.config.reference import name_of

    variable, value = name_of("admin_password_hash"), PasswordHasher().hash(given)
    # Quoted, because a shell would expand the dollars in the hash.
    show_answer({variable: value}, as_json, [f"export {variable}='{value}'"])
