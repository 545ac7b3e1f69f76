"""`ndif env`: the server's Python version and packages."""

from __future__ import annotations

import click

from ndif.cli.output import console, show_json, table
from ndif.cli.server_client import ServerClient, with_server


@click.command("env")
@with_server
def command(server: ServerClient, as_json: bool) -> None:
    """Show the server's Python version and packages."""
    answer = server.get("/env")
    if as_json:
        show_json(answer)
        return
    title = f"Python {answer['python_version'].split()[0]}"
    console().print(table(title, ["package", "version"], sorted(answer["packages"].items())))
