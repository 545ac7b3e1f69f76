"""`ndif alerts`: the server's incidents, and a test of their delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ndif.cli.output import duration, elapsed, show, show_answer, table
from ndif.cli.server_client import ServerClient, read, with_server

if TYPE_CHECKING:
    from rich.console import RenderableType

_FAILED = 1


@click.group("alerts")
def command() -> None:
    """Show alerts, and test their delivery."""


@command.command("list")
@with_server
def list_alerts(server: ServerClient, as_json: bool) -> None:
    """Show open incidents, incidents resolved during the last day, and recipients."""
    show(server.get("/admin/alerts"), as_json, _rendered)


@command.command("test")
@with_server
def test(server: ServerClient, as_json: bool) -> None:
    """Send a test message to every webhook and mailbox, and show the outcomes.

    The exit code is 1 if a recipient did not accept the message.
    """
    from ndif.schema.alerts import TestedAlerts

    answer = server.post("/admin/alerts/test", {})
    tested = read(TestedAlerts, answer).destinations
    lines = [
        f"{destination.to} ({destination.form}): {destination.problem or 'delivered'}"
        for destination in tested
    ]
    show_answer(answer, as_json, lines)
    if any(destination.problem for destination in tested):
        click.get_current_context().exit(_FAILED)


def _rendered(answer: Any) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ndif.schema.alerts import Alerts

    alerts = read(Alerts, answer)
    parts: list[RenderableType] = []
    for title, incidents in (("Open", alerts.open), ("Resolved", alerts.resolved)):
        if not incidents:
            parts.append(Text(f"{title}: none."))
            continue
        rows: list[tuple[object, ...]] = [
            (
                incident.id if number == 0 else "",
                incident.severity if number == 0 else "",
                cause.kind,
                cause.sentence,
                elapsed(cause.since) if cause.over is None else duration(cause.over - cause.since),
                "holds" if cause.over is None else "over",
            )
            for incident in incidents
            for number, cause in enumerate(incident.causes)
        ]
        parts.append(table(title, ("incident", "severity", "kind", "cause", "for", "state"), rows))
    rows = [
        (destination.to, destination.form, destination.waiting, destination.problem)
        for destination in alerts.destinations
    ]
    parts.append(table("Recipients", ("to", "form", "waiting", "problem"), rows))
    return Group(*parts)
