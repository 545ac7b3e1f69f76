"""Properties of every command."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from ndif.cli.main import cli

SERVES_IN_A_TERMINAL = {"local start"}
"""A command that prints for people alone, until it is interrupted."""


def leaves(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something."""
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name}{word} ")
        else:
            yield f"{name}{word}", command


EVERY = dict(leaves(cli))


@pytest.mark.parametrize("name", sorted(EVERY.keys() - SERVES_IN_A_TERMINAL))
def test_it_prints_for_programs_too(name: str) -> None:
    options = [option for each in EVERY[name].params for option in each.opts]
    assert "--json" in options


@pytest.mark.parametrize("name", sorted(EVERY))
def test_it_says_what_it_does(name: str) -> None:
    assert EVERY[name].help
