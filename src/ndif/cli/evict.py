"""`ndif evict`: remove a model, one of its replicas, or all models from their devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ndif.cli.main import complete_models
from ndif.cli.output import show_answer, variant_name
from ndif.cli.server_client import ServerClient, read, with_server
from ndif.config.short_ids import unique_length

if TYPE_CHECKING:
    from ndif.control.answers import Evicted


@click.command("evict")
@click.argument("model", required=False, shell_complete=complete_models)
@click.option("--replica", metavar="ID", help="Evict only this replica; default: all replicas.")
@click.option(
    "--generation",
    metavar="0.7",
    help="Evict only the replicas for clients of this nnsight generation.",
)
@click.option("--cold", is_flag=True, help="Also remove the weights from CPU memory.")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Evict every model except models that the calendar has dedicated now.",
)
@with_server
def command(
    server: ServerClient,
    as_json: bool,
    model: str | None,
    replica: str | None,
    generation: str | None,
    cold: bool,
    everything: bool,
) -> None:
    """Remove MODEL, a repo id or a model key, from its devices."""
    from ndif.control.answers import Evicted

    if everything == (model is not None) or (everything and replica):
        raise click.UsageError("Give either MODEL, optionally with --replica, or --all.")
    body = {
        "model": model,
        "replica": replica,
        "generation": generation,
        "cold": cold,
        "all": everything,
    }
    content = server.post("/admin/evict", body, None, "requests that run there to end")
    answer = read(Evicted, content)
    show_answer(answer, as_json, _lines(answer))


def _lines(answer: Evicted) -> Iterator[str]:
    length = unique_length(eviction.replica_id or "" for eviction in answer.evicted)
    for eviction in answer.evicted:
        outcome = "the deployment is cancelled"
        if eviction.replica_id:
            outcome = f"replica {eviction.replica_id[:length]} is evicted"
        yield f"{variant_name(eviction.model_key)}: {outcome}."
    for repo_id in answer.scheduled:
        yield f"{repo_id} is not evicted: the calendar has it dedicated now."
    if not answer.evicted:
        yield "There was nothing to evict."
