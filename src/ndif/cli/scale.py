"""`ndif scale`: set the number of replicas of a model."""

from __future__ import annotations

import click

from ndif.cli.deploy import post_with_progress, report
from ndif.cli.main import complete_models
from ndif.cli.server_client import ServerClient, with_server


@click.command("scale")
@click.argument("model", shell_complete=complete_models)
@click.argument("replicas", type=click.IntRange(0))
@click.option(
    "--generation",
    metavar="0.8",
    help="nnsight generation of the replicas; default: the deployed generation.",
)
@with_server
def command(
    server: ServerClient, as_json: bool, model: str, replicas: int, generation: str | None
) -> None:
    """Set the number of REPLICAS of MODEL, a repo id or a model key."""
    body = {"model": model, "replicas": replicas, "generation": generation}
    awaited = f"{model} to be measured and placed"
    answer = post_with_progress(server, "/admin/scale", body, quiet=as_json, awaited=awaited)
    report(answer, as_json, state="is to have")
