"""`ndif gc`: delete expired data now."""

from __future__ import annotations

import click

from ndif.cli.output import show_answer
from ndif.cli.server_client import ServerClient, read, with_server


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Count the expired data without deleting it.")
@with_server
def command(server: ServerClient, as_json: bool, dry_run: bool) -> None:
    """Delete expired results, responses and job records.

    The server also deletes expired data by itself, every few minutes.
    """
    from ndif.control.answers import Collected

    answer = read(Collected, server.post("/admin/gc", {"dry_run": dry_run}, timeout_s=None))
    verb = "would be" if dry_run else "were"
    counts = [f"{count} {name}" for name, count in answer.expired.items() if count]
    expired = ", ".join(counts) if counts else "nothing"
    show_answer(answer, as_json, [f"Expired: {expired}{f' {verb} deleted' if counts else ''}."])
