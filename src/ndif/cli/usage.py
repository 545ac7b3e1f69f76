"""`ndif usage`: totals of jobs by user, model or day."""

from __future__ import annotations

import csv
import sys
from datetime import datetime, timedelta, timezone

import click

from ndif.cli.durations import DurationParam
from ndif.cli.jobs import as_user
from ndif.cli.output import console, duration, show_json, table
from ndif.cli.server_client import ServerClient, read
from ndif.sizes import format_size

_COLUMNS = ("name", "jobs", "errors", "execution_s", "result_bytes")


@click.command("usage")
@click.option(
    "--by",
    type=click.Choice(["user", "model", "day"]),
    help="Group by user, model or day. Default: user; with an API key, model.",
)
@click.option(
    "--since",
    type=DurationParam(0),
    metavar="DURATION",
    help="Count from the day (UTC) this long ago, such as 7d. Default: all days.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@as_user
def command(
    server: ServerClient, as_json: bool, by: str | None, since: float | None, as_csv: bool
) -> None:
    """Show totals of ended jobs: number, errors, run time and size of results.

    With an API key, the totals cover its user's jobs; with the operator's token, all jobs.
    """
    from ndif.control.answers import UsageReport

    day = None
    if since is not None:
        day = (datetime.now(timezone.utc) - timedelta(seconds=since)).date().isoformat()
    by = by or ("model" if server.is_user else "user")
    if server.is_user:
        content = server.get(f"/usage?by={by}" + (f"&since={day}" if day else ""))
    else:
        content = server.post("/admin/usage", {"by": by, "since": day})
    answer = read(UsageReport, content)
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow((by, *_COLUMNS[1:]))
        writer.writerows([getattr(total, name) for name in _COLUMNS] for total in answer.usage)
    elif as_json:
        show_json(answer)
    else:
        rows = [
            (
                total.name,
                total.jobs,
                total.errors,
                duration(total.execution_s),
                format_size(total.result_bytes),
            )
            for total in answer.usage
        ]
        console().print(table("Usage", (by, "jobs", "errors", "ran", "results"), rows))
