"""`ndif scale`."""

from __future__ import annotations

import click

from ndif.cli.admin import Server, to_a_server
from ndif.cli.completion import models


@click.command("scale")
@click.argument("model", shell_complete=models)
@click.argument("replicas", type=click.IntRange(0))
@click.option(
    "--generation", metavar="0.8", help="Of this nnsight; default: of the one that is deployed."
)
@to_a_server
def command(
    server: Server, as_json: bool, model: str, replicas: int, generation: str | None
) -> None:
    """Have as many REPLICAS of MODEL, a repo id or a model key."""
    from ndif.cli.loading import report, watched

    body = {"model": model, "replicas": replicas, "generation": generation}
    report(watched(server, "/admin/scale", body, quiet=as_json), as_json, state="is to have")
