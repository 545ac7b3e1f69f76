"""`ndif queue`: what runs and waits, model by model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.admin import Server, to_a_server

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("queue")
@click.option(
    "--watch", type=click.FloatRange(0.2), metavar="SECONDS", help="Show it again and again."
)
@to_a_server
def command(server: Server, as_json: bool, watch: float | None) -> None:
    """Show the requests that run and those that wait."""
    from ndif.cli.watching import show

    show(lambda: server.get("/admin/queue"), _drawn, as_json=as_json, every_s=watch)


def _drawn(queue: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    from ndif.cli.output import add_rows, lasting, name_of, since, table

    made = table(
        "Requests", "model", "nnsight", "request", "user", "place", "for", "starts in", "replica"
    )
    for model in queue["models"]:
        head = (name_of(model), model["generation"])
        running = [
            (each["request_id"], each["user"], "runs", since(each["since"]), "", each["replica_id"])
            for each in model["running"]
        ]
        waiting = [
            (
                each["request_id"],
                each["user"],
                each["position"],
                since(each["received"]),
                lasting(each["expected_start_s"]),
                "",
            )
            for each in model["waiting"]
        ]
        add_rows(
            made,
            ((*(head if n == 0 else ("", "")), *row) for n, row in enumerate([*running, *waiting])),
        )
    return made if made.row_count else Text("Nothing runs, and nothing waits.")
