"""`ndif`: each command is imported when it is called, so that help answers at once."""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    "deploy": "Have models loaded before anybody asks for them.",
    "doctor": "Show what this machine has to confine strangers' code with.",
    "env": "Show the server's Python and the packages that it has.",
    "evict": "Take a model, or a replica of it, off its devices.",
    "export": "Print a deployment file that brings up what is deployed now.",
    "info": "Show the server that runs here, and every variable with its value.",
    "kill": "End a request, whether it waits or runs.",
    "local": "Serve one model to yourself: no queue, no accounts, nothing to install beside it.",
    "logs": "Show the server's log.",
    "queue": "Show the requests that run and those that wait.",
    "restart": "Start the server, or one model's replicas, anew.",
    "runtime": "Install nnsight generations, so that clients of each can be served.",
    "scale": "Have more or fewer replicas of a model.",
    "simulate": "Replay a day of requests on a cluster that need not exist.",
    "start": "Serve any model to many users.",
    "status": "Show the machines, the models and their replicas.",
    "stop": "Stop the server.",
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
