"""`ndif env`: the server's Python version and packages."""

from __future__ import annotations

import click

from ndif.cli.server_client import ServerClient, with_server


@click.command("env")
@with_server
def command(server: ServerClient, as_json: bool) -> None:
    """Show the server's Python version and packages."""
    from ndif.cli.output import add_rows, console, show_json, table

    answer = server.get("/env")
    if as_json:
        show_json(answer)
        return
    made = table(f"Python {answer['python_version'].split()[0]}", "package", "version")
    console().print(add_rows(made, sorted(answer["packages"].items())))
