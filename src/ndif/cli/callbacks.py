"""`ndif callbacks`: the callbacks of ended jobs that wait or were given up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.output import duration, elapsed, show, show_answer, table
from ndif.cli.server_client import ServerClient, read, with_server
from ndif.config.short_ids import unique_length

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.group("callbacks")
def command() -> None:
    """Show call-backs that wait or were given up, and make them again."""


@command.command("list")
@with_server
def list_callbacks(server: ServerClient, as_json: bool) -> None:
    """Show the call-backs that were given up, and those that wait."""
    show(server.get("/admin/callbacks"), as_json, _rendered)


@command.command("retry")
@click.argument("request_id", required=False)
@click.option("--all", "every", is_flag=True, help="Every call-back that was given up.")
@with_server
def retry(server: ServerClient, as_json: bool, request_id: str | None, every: bool) -> None:
    """Make the call-back of a request again now, with all of its attempts.

    REQUEST_ID may be the beginning of one, as `ndif callbacks list` shows it.
    """
    from ndif.control.answers import Retried

    if every == (request_id is not None):
        raise click.UsageError("Give either a request's id or --all.")
    body = {"all": True} if every else {"request_id": request_id}
    answer = read(Retried, server.post("/admin/callbacks/retry", body))
    count = len(answer.retried)
    sentence = f"The call-back of {answer.retried[0]} is made again." if count == 1 else None
    show_answer(answer, as_json, [sentence or f"{count} call-backs are made again."])


def _rendered(answer: Any) -> RenderableType:
    from rich.text import Text

    from ndif.schema.callback import Callbacks

    callbacks = read(Callbacks, answer)
    if not callbacks.callbacks:
        return Text("No call-back waits, and none was given up.")
    length = unique_length(callback.request_id for callback in callbacks.callbacks)
    rows = [
        (
            callback.request_id[:length],
            callback.to,
            callback.status,
            callback.state,
            callback.attempts,
            elapsed(callback.created),
            duration(callback.due - time.time()) if callback.state == "waiting" else None,
            callback.problem,
        )
        for callback in callbacks.callbacks
    ]
    title = f"Call-backs: {callbacks.waiting} waiting, {callbacks.given_up} given up"
    headings = ("request", "to", "job", "state", "failed", "for", "again in", "problem")
    return table(title, headings, rows)
