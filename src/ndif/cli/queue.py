"""`ndif queue`: running and waiting requests, model by model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.server_client import ServerClient, with_server

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("queue")
@click.option(
    "--watch", type=click.FloatRange(0.2), metavar="SECONDS", help="Repeat every SECONDS seconds."
)
@with_server
def command(server: ServerClient, as_json: bool, watch: float | None) -> None:
    """Show running and waiting requests."""
    from ndif.cli.output import show

    show(lambda: server.get("/admin/queue"), _rendered, as_json=as_json, interval_s=watch)


def _rendered(queue: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    from ndif.cli.output import add_rows, duration, elapsed, name_of, table

    made = table(
        "Requests", "model", "nnsight", "request", "user", "position", "for", "starts in", "replica"
    )
    for model in queue["models"]:
        head = (name_of(model), model["generation"])
        running = [
            (
                each["request_id"],
                each["user"],
                "running",
                elapsed(each["since"]),
                "",
                each["replica_id"],
            )
            for each in model["running"]
        ]
        waiting = [
            (
                each["request_id"],
                each["user"],
                each["position"],
                elapsed(each["received"]),
                duration(each["expected_start_s"]),
                "",
            )
            for each in model["waiting"]
        ]
        add_rows(
            made,
            ((*(head if n == 0 else ("", "")), *row) for n, row in enumerate([*running, *waiting])),
        )
    return made if made.row_count else Text("No request is running or waiting.")
