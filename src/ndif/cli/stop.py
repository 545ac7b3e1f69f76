"""`ndif stop`."""

from __future__ import annotations

import click

from ndif.cli.admin import Server, to_a_server


@click.command("stop")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How long it may take to end by itself.",
)
@to_a_server
def command(server: Server, as_json: bool, timeout: float) -> None:
    """Stop the server, with its model processes."""
    from ndif.cli.ending import end
    from ndif.cli.output import show_json

    how = end(server, timeout)
    if as_json:
        show_json({"stopped": server.url, "how": how})
    else:
        click.echo(f"The server at {server.url} has stopped.")
