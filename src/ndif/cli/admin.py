"""`ndif admin`: the operator's login in a browser."""

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
    """Make the password that opens the operator's part of the web page."""


@command.command("password")
@json_option
def password(as_json: bool) -> None:
    """Ask for a password twice, or read it from standard input, and print the variable for the server.

    The variable has a hash, which does not lead back to the password. Give it to the environment of
    `ndif start`, on every machine that has gateways. Another hash ends the logins of this one.
    """
    if sys.stdin.isatty():
        given = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        given = sys.stdin.readline(_MAX_LENGTH + 2).rstrip("\r\n")
    if not SHORTEST <= len(given) <= _MAX_LENGTH:
        raise CommandError(
            f"A password has {SHORTEST} to {_MAX_LENGTH} characters; a few words will do."
        )
    from argon2 import PasswordHasher

    from ndif.config.reference import name_of

    variable, value = name_of("admin_password_hash"), PasswordHasher().hash(given)
    # Quoted, because a shell would expand the dollars in the hash.
    show_answer({variable: value}, as_json, [f"export {variable}='{value}'"])
