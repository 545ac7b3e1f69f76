"""`ndif restart`: the server, or one model's replicas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ndif.cli.admin import CommandError, RefusedError, Server, options, to_a_server
from ndif.cli.completion import models
from ndif.services.roles import WORDS

if TYPE_CHECKING:
    from ndif.session.folder import Session
    from ndif.session.record import Record


@click.command("restart")
@click.argument("model", required=False, shell_complete=models)
@to_a_server
def command(server: Server, as_json: bool, model: str | None) -> None:
    """Start MODEL's replicas anew; without it, the server.

    The server comes back behind the terminal, with the options and the environment that it was started
    with, and with the models that are deployed now.
    """
    if model is None:
        _server(server, as_json)
    else:
        _model(server, as_json, model)


def _model(server: Server, as_json: bool, model: str) -> None:
    from ndif.cli.output import called, show_json

    answer = server.post("/admin/restart", {"model": model})
    if as_json:
        show_json(answer)
        return
    for replica in answer["restarted"]:
        click.echo(
            f"{called(replica['model_key'])}: replica {replica['replica_id']} is started anew."
        )


def _server(server: Server, as_json: bool) -> None:
    from ndif.cli.ending import end
    from ndif.session.folder import Sessions

    running = Sessions(options().session_root).running()
    if not server.is_local or running is None:
        raise RefusedError(
            "A server is restarted on its own machine; from here, `ndif restart MODEL` starts a model "
            "anew."
        )
    session, record = running
    # Read while it lives: a variable that was set since is not one that it was started with.
    environment = _environment(record.pid)
    arguments = _arguments(server, session, record)
    end(server)
    done = subprocess.run(  # noqa: S603 - our own interpreter, and what the server was started with
        [
            *(sys.executable, "-m", "ndif", "start", "--detach", *arguments),
            *(["--json"] if as_json else []),
        ],
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise CommandError("The server was stopped, and did not start again.")


def _arguments(server: Server, session: Session, record: Record) -> list[str]:
    """What it was started with; its models are those of now, if it can still say which.

    Raises:
        CommandError: if no server could be started with those.
    """
    from ndif.schema.deployment_file import DeploymentFileError, read_file

    try:
        deployed = server.get("/admin/export")["deployments"]
    except CommandError:
        return record.arguments
    file = session.folder / "deployments.json"
    file.write_text(json.dumps(deployed, indent=2))
    try:
        read_file(file)
    except DeploymentFileError as error:
        raise CommandError(
            f"What is deployed now could not be deployed again, so the server goes on as it is:\n{error}"
        ) from error
    words = [word for word in record.arguments[:1] if word in WORDS]
    place = ["--host", record.host, "--port", str(record.port)]
    return [*words, *place, "--deployment-config", str(file)]


def _environment(pid: int) -> dict[str, str]:
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError as error:
        raise CommandError(
            f"The environment of process {pid} cannot be read: {error.strerror}."
        ) from error
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if b"=" in entry)
    return {
        name.decode(errors="surrogateescape"): value.decode(errors="surrogateescape")
        for name, _, value in pairs
    }
