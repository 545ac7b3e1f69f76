"""`ndif kill`."""

from __future__ import annotations

import click

from ndif.cli.admin import Server, to_a_server


@click.command("kill")
@click.argument("request_id")
@to_a_server
def command(server: Server, as_json: bool, request_id: str) -> None:
    """End a request, whether it waits or runs; its user is told."""
    from ndif.cli.output import show_json

    answer = server.post("/admin/kill", {"request_id": request_id})
    if as_json:
        show_json(answer)
    else:
        click.echo(f"Request {request_id} is ended.")
