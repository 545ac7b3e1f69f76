"""`ndif deploy`: have models loaded before anybody asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ndif.cli.admin import CommandError, Server, to_a_server


@click.command("deploy")
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]...")
@click.option(
    "--deployment-config",
    "deployment_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A YAML or JSON file of models and their settings.",
)
@click.option("--sync", is_flag=True, help="Evict every model that is deployed and not named here.")
@click.option("--dedicated", is_flag=True, help="Never evict them for others.")
@click.option("--replicas", type=click.IntRange(1), help="Copies of each that share its requests.")
@click.option(
    "--generation", metavar="0.8", help="Deploy for clients of this nnsight; default: the newest."
)
@click.option("--no-wait", is_flag=True, help="Do not wait until they are ready.")
@to_a_server
def command(
    server: Server,
    as_json: bool,
    checkpoints: tuple[str, ...],
    deployment_file: Path | None,
    sync: bool,
    dedicated: bool,
    replicas: int | None,
    generation: str | None,
    no_wait: bool,
) -> None:
    """Deploy each CHECKPOINT: a Hugging Face repo id, a model key, or ORG/NAME=FOLDER.

    A folder is one of the server's machine. Exit code 1 says that a model could not be deployed.
    """
    from ndif.cli.loading import report, watched

    entries = _entries(server, checkpoints, deployment_file)
    for entry in entries:
        entry.update({"dedicated": True} if dedicated else {})
        entry.update({"replicas": replicas} if replicas is not None else {})
    body = {
        "deployments": entries,
        "generation": generation,
        "wait": not no_wait,
        "sync": sync,
    }
    answer = watched(server, "/admin/deploy", body, quiet=as_json or no_wait)
    report(answer, as_json, state="is being loaded" if no_wait else "is ready")


def _entries(
    server: Server, checkpoints: tuple[str, ...], file: Path | None
) -> list[dict[str, Any]]:
    if bool(checkpoints) == (file is not None):
        raise click.UsageError("Name either CHECKPOINTs or a file with --deployment-config.")

    from ndif.schema.checkpoints import CheckpointError, deployment_of
    from ndif.schema.deployment_entry import entry_of
    from ndif.schema.deployment_file import DeploymentFileError, read_file

    try:
        configs = (
            read_file(file)
            if file is not None
            else [deployment_of(each, here=server.is_local) for each in checkpoints]
        )
    except (CheckpointError, DeploymentFileError) as error:
        raise CommandError(str(error)) from error
    if not configs:
        raise CommandError(f"{file} names no model.")
    return [entry_of(config) for config in configs]
