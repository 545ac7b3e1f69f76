"""Properties of every command."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ndif.cli.main import cli

SERVES_IN_A_TERMINAL = {"local start"}
"""Commands without JSON output, which run until interrupted."""


def leaves(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield every command that is not a group."""
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name}{word} ")
        else:
            yield f"{name}{word}", command


EVERY = dict(leaves(cli))


def test_every_command_has_json_option() -> None:
    for_people_alone = {
        name
        for name, command in EVERY.items()
        if "--json" not in [option for param in command.params for option in param.opts]
    }
    assert for_people_alone <= SERVES_IN_A_TERMINAL


def test_every_command_has_help() -> None:
    assert not [name for name, command in EVERY.items() if not command.help]
