"""`ndif kill`: end a request."""

from __future__ import annotations

import click

from ndif.cli.output import show_answer
from ndif.cli.server_client import ServerClient, read, with_server


@click.command("kill")
@click.argument("request_id")
@with_server
def command(server: ServerClient, as_json: bool, request_id: str) -> None:
    """End a waiting or running request; its user gets an error.

    REQUEST_ID may be a unique prefix, as `ndif queue` shows it.
    """
    from ndif.control.answers import Killed

    answer = read(Killed, server.post("/admin/kill", {"request_id": request_id}))
    show_answer(answer, as_json, [f"Request {answer.request_id} is ended."])
