"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click
from docs.make.text import cell, code

from ndif.cli.main import cli

_HEAD = """\
# Commands

Every command, as `ndif COMMAND --help` shows it. [Exit codes](../operating.md#from-scripts) are the same
for all.

"""


def every(group: click.Group, name: str) -> Iterator[tuple[click.Context, click.Command]]:
    """Yield a group's commands, those of groups below it after these, each with a context of its name."""
    context = click.Context(group, info_name=name, **group.context_settings)
    yield context, group
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        if isinstance(command, click.Group):
            yield from every(command, f"{name} {word}")
        else:
            settings = {**group.context_settings, **command.context_settings}
            yield click.Context(command, info_name=f"{name} {word}", **settings), command


def page() -> str:
    """Return the page."""
    return _HEAD + "".join(_section(context, command) for context, command in every(cli, "ndif"))


def _section(context: click.Context, command: click.Command) -> str:
    usage = " ".join([str(context.info_name), *command.collect_usage_pieces(context)])
    level = "#" * (1 + len(str(context.info_name).split()))
    # Click folds paragraphs; `\\b` marks one that it leaves.
    help_text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    parts = [f"{level} {context.info_name}\n", f"```text\n{usage}\n```\n", f"{help_text}\n"]
    records = [
        record
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        and (record := parameter.get_help_record(context)) is not None
        and "--help" not in parameter.opts
    ]
    if records:
        rows = "".join(f"| {code(names)} | {cell(text)} |\n" for names, text in records)
        parts.append(f"| option | |\n| --- | --- |\n{rows}")
    if isinstance(command, click.Group):
        rows = "".join(
            f"| {code(word)} | {cell(_first_line(command, context, word))} |\n"
            for word in command.list_commands(context)
        )
        parts.append(f"| command | |\n| --- | --- |\n{rows}")
    return "\n".join(parts) + "\n"


def _first_line(group: click.Group, context: click.Context, word: str) -> str:
    command = group.get_command(context, word)
    assert command is not None
    return command.get_short_help_str(limit=200)
