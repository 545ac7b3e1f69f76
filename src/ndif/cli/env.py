"""`ndif env`."""

from __future__ import annotations

import click

from ndif.cli.admin import Server, to_a_server


@click.command("env")
@to_a_server
def command(server: Server, as_json: bool) -> None:
    """Show the server's Python and the packages that it has."""
    from ndif.cli.output import add_rows, console, show_json, table

    answer = server.get("/env")
    if as_json:
        show_json(answer)
        return
    made = table(f"Python {answer['python_version'].split()[0]}", "package", "version")
    console().print(add_rows(made, sorted(answer["packages"].items())))
