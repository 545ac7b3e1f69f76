"""`ndif queue`: running and waiting requests by model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ndif.cli.durations import DurationParam
from ndif.cli.output import below_head, duration, elapsed, refresh, table
from ndif.cli.server_client import ServerClient, read, with_server
from ndif.config.short_ids import unique_length

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ndif.schema.job_state import RunningRequest, WaitingRequest


@click.command("queue")
@click.option(
    "--watch",
    type=DurationParam(0.2),
    metavar="DURATION",
    help="Refresh at this interval, such as 2s.",
)
@with_server
def command(server: ServerClient, as_json: bool, watch: float | None) -> None:
    """Show running and waiting requests by model."""
    refresh(lambda: server.get("/admin/queue"), as_json, _rendered, watch)


def _rendered(answer: Any) -> RenderableType:
    from rich.text import Text

    from ndif.schema.job_state import Queues

    queues = read(Queues, answer)
    running = [request for model in queues.models for request in model.running]
    waiting = [request.request_id for model in queues.models for request in model.waiting]
    length = unique_length([*(request.request_id for request in running), *waiting])
    replica_length = unique_length(request.replica_id for request in running)
    rows: list[tuple[object, ...]] = []
    for model in queues.models:
        requests: list[tuple[object, ...]] = [
            (
                *_id_and_user(request, length),
                "running",
                elapsed(request.since),
                "",
                request.replica_id[:replica_length],
            )
            for request in model.running
        ]
        for request in model.waiting:
            times = elapsed(request.received), duration(request.expected_start_s)
            requests.append((*_id_and_user(request, length), request.position, *times, ""))
        rows += below_head((model.repo_id, model.generation), requests)
    if not rows:
        return Text("No request is running or waiting.")
    headings = ("request", "user", "position", "for", "starts in", "replica")
    return table("Requests", ("model", "nnsight", *headings), rows)


def _id_and_user(request: RunningRequest | WaitingRequest, length: int) -> tuple[str, str]:
    return request.request_id[:length], request.user
