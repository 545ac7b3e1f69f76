"""`ndif evict`: remove a model from its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ndif.cli.main import complete_models
from ndif.cli.output import show_answer, variant_name
from ndif.cli.server_client import ServerClient, with_server


@click.command("evict")
@click.argument("model", shell_complete=complete_models)
@click.option("--replica", metavar="ID", help="Evict only this replica; default: all replicas.")
@click.option("--cold", is_flag=True, help="Do not keep the weights in CPU memory either.")
@with_server
def command(
    server: ServerClient, as_json: bool, model: str, replica: str | None, cold: bool
) -> None:
    """Remove MODEL, a repo id or a model key, from its devices."""
    answer = server.post("/admin/evict", {"model": model, "replica": replica, "cold": cold}, None)
    show_answer(answer, as_json, map(_outcome, answer["evicted"]))


def _outcome(evicted: Mapping[str, Any]) -> str:
    replica_id = evicted["replica_id"]
    outcome = f"replica {replica_id} is evicted" if replica_id else "its deployment is cancelled"
    return f"{variant_name(evicted['model_key'])}: {outcome}."
