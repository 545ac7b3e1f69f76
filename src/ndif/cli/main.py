"""`ndif`: each command is imported when it is called, so that help answers at once."""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    "doctor": "Show what this machine has to confine strangers' code with.",
    "local": "Serve one model to yourself: no queue, no accounts, nothing to install beside it.",
    "runtime": "Install nnsight generations, so that clients of each can be served.",
    "version": "Print the version.",
}


class Lazy(click.Group):
    """A group whose commands are modules of this folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See `click.Group`."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See `click.Group`."""
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ndif.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name]) for name in self.list_commands(ctx)])


@click.command(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Run nnsight traces next to the weights."""
