"""`ndif restart`: restart the server, or the replicas of one model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

from ndif.cli import stop
from ndif.cli.main import complete_models
from ndif.cli.output import show_answer, variant_name
from ndif.cli.server_client import (
    CommandError,
    RefusedError,
    ServerClient,
    run_folders,
    with_server,
)
from ndif.launch.run_folder import RunFolder, RunRecord
from ndif.launch.services import COMPONENTS


@click.command("restart")
@click.argument("model", required=False, shell_complete=complete_models)
@with_server
def command(server: ServerClient, as_json: bool, model: str | None) -> None:
    """Restart the replicas of MODEL, or without MODEL the server.

    The server starts again detached from the terminal, with the options and the environment of its first
    start and the models that are deployed now.
    """
    if model is None:
        _restart_server(server, as_json)
        return
    answer = server.post("/admin/restart", {"model": model})
    show_answer(
        answer,
        as_json,
        (
            f"{variant_name(each['model_key'])}: replica {each['replica_id']} restarts."
            for each in answer["restarted"]
        ),
    )


def _restart_server(server: ServerClient, as_json: bool) -> None:
    running = run_folders().running()
    if not server.is_local or running is None:
        raise RefusedError(
            "A server can be restarted on its own machine only; from here, `ndif restart MODEL` restarts "
            "the replicas of a model."
        )
    run_folder, record = running
    # Read while the server lives: this command's own environment may have changed since the start.
    environment = _environment(record.pid)
    arguments = _arguments(server, run_folder, record)
    stop.end(server)
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
    """Return the arguments of the first start with the models deployed now, if the server can name them."""
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
    pairs = (entry.partition("=") for entry in os.fsdecode(content).split("\0"))
    return {name: value for name, equals, value in pairs if equals}
