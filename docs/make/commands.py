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


def every(
    command: click.Command, name: str, above: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield the context of a command, and of each one below it."""
    context = click.Context(command, above, name, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            if (below := command.get_command(context, word)) is not None:
                yield from every(below, word, context)


def page() -> str:
    """Return the page."""
    return _HEAD + "".join(map(_section, every(cli, "ndif")))


def _section(context: click.Context) -> str:
    command, name = context.command, context.command_path
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    level = "#" * (1 + len(name.split()))
    # Click folds paragraphs; `\\b` marks one that it leaves.
    help_text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    parts = [f"{level} {name}\n", f"```text\n{usage}\n```\n", f"{help_text}\n"]
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
        below = (command.get_command(context, word) for word in command.list_commands(context))
        rows = "".join(
            f"| {code(each.name or '')} | {cell(each.get_short_help_str(limit=200))} |\n"
            for each in below
            if each is not None
        )
        parts.append(f"| command | |\n| --- | --- |\n{rows}")
    return "\n".join(parts) + "\n"
