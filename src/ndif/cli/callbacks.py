"""`ndif callbacks`: undelivered webhooks and mails."""

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
    """Show and retry undelivered webhooks and mails."""


@command.command("list")
@with_server
def list_callbacks(server: ServerClient, as_json: bool) -> None:
    """Show the webhooks and mails that wait or were given up."""
    show(server.get("/admin/callbacks"), as_json, _rendered)


@command.command("retry")
@click.argument("request_id", required=False)
@click.option("--all", "every", is_flag=True, help="Retry all that were given up.")
@with_server
def retry(server: ServerClient, as_json: bool, request_id: str | None, every: bool) -> None:
    """Retry the webhook or mail of a request now, with its full number of attempts.

    REQUEST_ID may be a unique prefix, as `ndif callbacks list` shows it.
    """
    from ndif.control.answers import Retried

    if every == (request_id is not None):
        raise click.UsageError("Give either REQUEST_ID or --all.")
    body = {"all": True} if every else {"request_id": request_id}
    answer = read(Retried, server.post("/admin/callbacks/retry", body))
    count = len(answer.retried)
    if count == 1:
        sentence = f"The webhook or mail of {answer.retried[0]} is retried."
    else:
        sentence = f"{count} webhooks and mails are retried."
    show_answer(answer, as_json, [sentence])


def _rendered(answer: Any) -> RenderableType:
    from rich.text import Text

    from ndif.schema.callback import Callbacks

    callbacks = read(Callbacks, answer)
    if not callbacks.callbacks:
        return Text("No webhook or mail waits, and none was given up.")
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
    title = f"Webhooks and mails: {callbacks.waiting} waiting, {callbacks.given_up} given up"
    headings = ("request", "to", "job", "state", "failed", "age", "next in", "problem")
    return table(title, headings, rows)
