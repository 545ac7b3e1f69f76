"""`ndif queue`: running and waiting requests, model by model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ndif.cli.durations import DurationParam
from ndif.cli.output import duration, elapsed, refresh, table, under
from ndif.cli.server_client import ServerClient, read, with_server
from ndif.config.short_ids import unique_length

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ndif.schema.job_state import RunningRequest, WaitingRequest


@click.command("queue")
@click.option(
    "--watch", type=DurationParam(0.2), metavar="DURATION", help="Repeat so often, such as 2s."
)
@with_server
def command(server: ServerClient, as_json: bool, watch: float | None) -> None:
    """Show running and waiting requests."""
    refresh(lambda: server.get("/admin/queue"), as_json, _rendered, watch)


def _rendered(answer: Any) -> RenderableType:
    from rich.text import Text

    from ndif.schema.job_state import Queues

    queues = read(Queues, answer)
    running = [each for model in queues.models for each in model.running]
    waiting = [each.request_id for model in queues.models for each in model.waiting]
    length = unique_length([*(each.request_id for each in running), *waiting])
    of_replica = unique_length(each.replica_id for each in running)
    rows: list[tuple[object, ...]] = []
    for model in queues.models:
        requests: list[tuple[object, ...]] = [
            (
                *_whose(each, length),
                "running",
                elapsed(each.since),
                "",
                each.replica_id[:of_replica],
            )
            for each in model.running
        ]
        for each in model.waiting:
            times = elapsed(each.received), duration(each.expected_start_s)
            requests.append((*_whose(each, length), each.position, *times, ""))
        rows += under((model.repo_id, model.generation), requests)
    if not rows:
        return Text("No request is running or waiting.")
    of_request = ("request", "user", "position", "for", "starts in", "replica")
    return table("Requests", ("model", "nnsight", *of_request), rows)


def _whose(request: RunningRequest | WaitingRequest, length: int) -> tuple[str, str]:
    return request.request_id[:length], request.user
