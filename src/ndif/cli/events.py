"""`ndif events`: the log of changes on the server, with author and time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ndif.cli.output import show, table
from ndif.cli.server_client import ServerClient, read, with_server

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ndif.control.answers import Events


@click.command("events")
@click.option("--kind", help="Only events of this kind, such as deployed or 'failed login'.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="Maximum number of events.")
@with_server
def command(server: ServerClient, as_json: bool, kind: str | None, limit: int) -> None:
    """Show recent changes on the server with author and time, newest first.

    The server keeps the last thousand events, including logins and failed logins.
    """
    from ndif.control.answers import Events

    events = read(Events, server.get("/admin/events")).events
    chosen = [event for event in events if kind in (None, event.kind)]
    show(Events(events=chosen[:limit]), as_json, _rendered)


def _rendered(answer: Events) -> RenderableType:
    from datetime import datetime

    rows = [
        (
            datetime.fromtimestamp(event.at).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            event.kind if event.count == 1 else f"{event.kind} ({event.count} times)",
            event.subject,
            event.by,
            event.text,
        )
        for event in answer.events
    ]
    return table("Events", ("time", "kind", "subject", "by", ""), rows)
