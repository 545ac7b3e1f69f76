"""`ndif env`: the Python version and packages with which a server runs blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from ndif.cli.output import show, table
from ndif.cli.server_client import ServerClient, with_server

if TYPE_CHECKING:
    from rich.table import Table


@click.command("env")
@click.option(
    "--generation",
    metavar="GENERATION",
    help="nnsight generation of the blocks; default: the newest.",
)
@with_server
def command(server: ServerClient, as_json: bool, generation: str | None) -> None:
    """Show the Python version and the packages with which the server runs blocks."""
    answer = server.get(f"/env?{urlencode({'generation': generation or ''})}")
    show(answer, as_json, _rendered)


def _rendered(answer: Any) -> Table:
    title = f"Python {answer['python_version'].split()[0]}"
    return table(title, ["package", "version"], sorted(answer["packages"].items()))
