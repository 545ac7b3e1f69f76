"""`ndif trace`: the steps of one job and their times."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ndif.cli.jobs import as_user, whole_id
from ndif.cli.output import show
from ndif.cli.server_client import read

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ndif.cli.server_client import ServerClient

_WIDTH = 40
"""Characters of the longest bar."""
_MS = 1000.0


@click.command("trace")
@click.argument("job_id")
@as_user
def command(server: ServerClient, as_json: bool, job_id: str) -> None:
    """Show the steps of a waiting, running or ended job. JOB_ID may be a unique prefix.

    The bar of a step shows its time between the start and the end of the job. Steps of
    different parts of the server, such as the queue and the replica, may overlap.
    """
    full_id = whole_id(server, job_id)
    if server.is_user:
        trace = server.get(f"/requests/{full_id}")
    else:
        trace = server.post("/admin/trace", {"job_id": full_id})
    show(trace, as_json, partial(_rendered, is_own=server.is_user))


def _rendered(answer: Any, *, is_own: bool) -> RenderableType:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from ndif.gateway.answers import OwnTraceAnswer
    from ndif.schema.job_state import OwnTrace, Trace

    kind: type[OwnTrace] = OwnTraceAnswer if is_own else Trace
    trace = read(kind, answer)
    steps = trace.steps
    received = datetime.fromtimestamp(trace.received, timezone.utc)
    owner = f" of {trace.user}" if isinstance(trace, Trace) else ""
    title = Text(
        f"{trace.id}{owner}: {trace.model}, nnsight {trace.generation}, "
        f"received {received.isoformat(' ', 'milliseconds')}, {answer['status']}"
    )
    if not steps:
        return Group(title, Text("No steps are recorded."))
    begin = min(step.start for step in steps)
    end = max(step.end for step in steps)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "by"):
        table.add_column(heading)
    for heading in ("begins", "takes"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for step in steps:
        table.add_row(
            escape(step.name),
            escape(step.by),
            _milliseconds(step.start - begin),
            _milliseconds(step.end - step.start),
            bar(step.start - begin, step.end - begin, end - begin),
        )
    suffix = f"; {trace.reason}" if trace.reason else ""
    total = Text(f"{_milliseconds(end - begin)} in all{suffix}")
    return Group(title, table, total)


def bar(start: float, end: float, whole_s: float) -> str:
    """Return a step's bar, at least one character wide, on a scale of `whole_s` seconds."""
    scale = _WIDTH / max(whole_s, 1e-6)
    first = min(int(start * scale), _WIDTH - 1)
    last = max(first + 1, round(end * scale))
    return " " * first + "█" * (last - first)


def _milliseconds(seconds: float) -> str:
    return f"{max(0.0, seconds) * _MS:,.1f} ms"
