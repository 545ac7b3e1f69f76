"""`ndif queue`: running and waiting requests, model by model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.durations import DurationParam
from ndif.cli.output import duration, elapsed, name_of, refresh, table, under
from ndif.cli.server_client import ServerClient, with_server
from ndif.config.short_ids import unique_length

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("queue")
@click.option(
    "--watch", type=DurationParam(0.2), metavar="DURATION", help="Repeat so often, such as 2s."
)
@with_server
def command(server: ServerClient, as_json: bool, watch: float | None) -> None:
    """Show running and waiting requests."""
    refresh(lambda: server.get("/admin/queue"), as_json, _rendered, watch)


def _rendered(queue: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    everything = [
        each for model in queue["models"] for each in (*model["running"], *model["waiting"])
    ]
    length = unique_length(each["request_id"] for each in everything)
    of_replica = unique_length(each["replica_id"] for each in everything if "replica_id" in each)
    rows: list[tuple[object, ...]] = []
    for model in queue["models"]:
        running = [
            ("running", elapsed(each["since"]), "", each["replica_id"][:of_replica])
            for each in model["running"]
        ]
        waiting = [
            (each["position"], elapsed(each["received"]), duration(each["expected_start_s"]), "")
            for each in model["waiting"]
        ]
        requests = [*model["running"], *model["waiting"]]
        rows += under(
            (name_of(model), model["generation"]),
            (
                (each["request_id"][:length], each["user"], *state)
                for each, state in zip(requests, [*running, *waiting], strict=True)
            ),
        )
    if not rows:
        return Text("No request is running or waiting.")
    of_request = ("request", "user", "position", "for", "starts in", "replica")
    return table("Requests", ("model", "nnsight", *of_request), rows)
