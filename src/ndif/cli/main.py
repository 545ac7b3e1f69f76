"""The command `ndif`; each of its commands is imported when it is called, so that help answers at once."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ndif.errors import NdifError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_COMMANDS = {
    "admin": "Make the operator's password for the web page.",
    "alerts": "Show alerts, and test their delivery.",
    "cache": "Show and delete models in this machine's Hub cache.",
    "callbacks": "Show and retry undelivered webhooks and mails.",
    "deploy": "Load models before their first request.",
    "doctor": "Check that this machine can run a server.",
    "env": "Show the Python version and packages that run blocks.",
    "events": "Show recent changes on the server, with author and time.",
    "evict": "Remove a model, one of its replicas, or all models from their devices.",
    "export": "Print a deployment file of the models deployed now.",
    "gc": "Delete expired results, responses and job records.",
    "healthz": "Check the health of this machine's server and services.",
    "info": "Show the server of this machine and its configuration.",
    "jobs": "List, cancel and download your jobs.",
    "keys": "Create, list and revoke API keys.",
    "kill": "End a waiting or running request.",
    "local": "Serve one model to yourself, without queue or accounts.",
    "logs": "Show the server's log.",
    "model": "Show a model's module tree and properties.",
    "probe": "Send a small trace to each model, and check the value.",
    "queue": "Show running and waiting requests.",
    "restart": "Restart the server, a service, or the replicas of one model.",
    "runtime": "Install the nnsight generations that clients may use.",
    "scale": "Set the number of replicas of a model.",
    "simulate": "Replay a day of requests on a simulated cluster.",
    "start": "Serve any model to many users.",
    "status": "Show nodes, models and replicas.",
    "stop": "Stop the server.",
    "tiers": "Manage rate-limit tiers.",
    "trace": "Show the steps of one job.",
    "usage": "Show totals of jobs by user, model or day.",
    "users": "Show the users of API keys.",
    "version": "Print the version; with --all also the versions of dependencies.",
}


class LazyGroup(click.Group):
    """A group whose commands are modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ndif.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See `click.Group`. The commands are listed without being imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Group`; an `NdifError` is printed as its message, with exit code 1."""
        try:
            return super().invoke(ctx)
        except click.ClickException:
            raise  # with an exit code of its own
        except NdifError as error:
            raise click.ClickException(str(error)) from error


@click.command(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.option(
    "--env-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of variables, one NAME=VALUE per line. Variables of the environment take precedence.",
)
def cli(env_file: Path | None) -> None:
    """Run nnsight traces next to the weights."""
    if env_file is None:
        return
    from dotenv import dotenv_values

    given = {name: value for name, value in dotenv_values(env_file).items() if value is not None}
    if given.keys() - os.environ.keys():
        # Run again with these variables: `ndif restart` reads a process's first environment.
        arguments = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, arguments, {**given, **os.environ})  # noqa: S606 - this program


def complete_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the repo ids of the server's models that begin with `incomplete`."""
    from click.shell_completion import CompletionItem

    from ndif.cli.server_client import connect

    with contextlib.suppress(NdifError, OSError, ValueError, KeyError, TypeError):
        server = connect(context.params.get("url"), context.params.get("token"))
        names = {str(model["repo_id"]) for model in server.get("/admin/status")["models"]}
        prefix = incomplete.lower()
        return [CompletionItem(name) for name in sorted(names) if name.lower().startswith(prefix)]
    return []
