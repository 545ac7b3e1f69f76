"""`ndif restart`: restart the server, or the replicas of one model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ndif.cli.main import complete_models
from ndif.cli.server_client import (
    CommandError,
    RefusedError,
    ServerClient,
    options,
    with_server,
)
from ndif.launch.services import COMPONENTS

if TYPE_CHECKING:
    from ndif.launch.run_folder import RunFolder, RunRecord


@click.command("restart")
@click.argument("model", required=False, shell_complete=complete_models)
@with_server
def command(server: ServerClient, as_json: bool, model: str | None) -> None:
    """Restart the replicas of MODEL, or without MODEL the server.

    The server starts again detached from the terminal, with the options and the environment of its first
    start and the models that are deployed now.
    """
    if model is None:
        _server(server, as_json)
    else:
        _model(server, as_json, model)


def _model(server: ServerClient, as_json: bool, model: str) -> None:
    from ndif.cli.output import show_json, variant_name

    answer = server.post("/admin/restart", {"model": model})
    if as_json:
        show_json(answer)
        return
    for replica in answer["restarted"]:
        click.echo(
            f"{variant_name(replica['model_key'])}: replica {replica['replica_id']} restarts."
        )


def _server(server: ServerClient, as_json: bool) -> None:
    from ndif.cli.shutdown import end
    from ndif.launch.run_folder import RunFolders

    running = RunFolders(options().session_root).running()
    if not server.is_local or running is None:
        raise RefusedError(
            "A server can be restarted on its own machine only; from here, `ndif restart MODEL` restarts "
            "the replicas of a model."
        )
    run_folder, record = running
    # Read while the server lives: this command's own environment may have changed since the start.
    environment = _environment(record.pid)
    arguments = _arguments(server, run_folder, record)
    end(server)
    done = subprocess.run(  # noqa: S603 - this interpreter, with the arguments of the first start
        [
            *(sys.executable, "-m", "ndif", "start", "--detach", *arguments),
            *(["--json"] if as_json else []),
        ],
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise CommandError("The server stopped, and did not start again.")


def _arguments(server: ServerClient, run_folder: RunFolder, record: RunRecord) -> list[str]:
    """Return the arguments of the first start with the models deployed now, if the server can name them.

    Raises:
        CommandError: If no server could be started with these models.
    """
    from ndif.schema.deployment_file import DeploymentFileError, read_file

    try:
        deployed = server.get("/admin/export")["deployments"]
    except CommandError:
        return record.arguments
    file = run_folder.folder / "deployments.json"
    file.write_text(json.dumps(deployed, indent=2))
    try:
        read_file(file)
    except DeploymentFileError as error:
        raise CommandError(
            f"What is deployed now could not be deployed again, so the server goes on as it is:\n{error}"
        ) from error
    component = [word for word in record.arguments[:1] if word in COMPONENTS]
    address = ["--host", record.host, "--port", str(record.port)]
    return [*component, *address, "--deployment-config", str(file)]


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
