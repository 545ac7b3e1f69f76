"""`ndif evict`."""

from __future__ import annotations

import click

from ndif.cli.admin import Server, to_a_server
from ndif.cli.completion import models


@click.command("evict")
@click.argument("model", shell_complete=models)
@click.option("--replica", metavar="ID", help="Only this replica; default: all of them.")
@click.option("--cold", is_flag=True, help="Out of the CPU's memory as well.")
@to_a_server
def command(server: Server, as_json: bool, model: str, replica: str | None, cold: bool) -> None:
    """Take MODEL, a repo id or a model key, off its devices."""
    from ndif.cli.output import called, show_json

    answer = server.post("/admin/evict", {"model": model, "replica": replica, "cold": cold}, None)
    if as_json:
        show_json(answer)
        return
    for each in answer["evicted"]:
        name, replica_id = called(each["model_key"]), each["replica_id"]
        what = (
            f"replica {replica_id} is evicted"
            if replica_id
            else "what was being set up is not to come"
        )
        click.echo(f"{name}: {what}.")
