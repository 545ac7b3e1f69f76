"""`ndif deploy`: load models before their first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ndif.cli.progress import post_with_progress, report
from ndif.cli.server_client import CommandError, ServerClient, with_server


@click.command("deploy")
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]...")
@click.option(
    "--deployment-config",
    "deployment_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML or JSON file of models and their settings.",
)
@click.option(
    "--sync", is_flag=True, help="Also evict every deployed model that this command does not name."
)
@click.option("--dedicated", is_flag=True, help="Never evict these models to make room for others.")
@click.option(
    "--replicas",
    type=click.IntRange(1),
    help="Number of replicas of each model, which share its requests.",
)
@click.option(
    "--generation",
    metavar="0.8",
    help="Deploy for clients of this nnsight generation; default: the newest.",
)
@click.option(
    "--no-wait", is_flag=True, help="Return at once instead of when the models are ready."
)
@with_server
def command(
    server: ServerClient,
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

    FOLDER is on the server's machine. The exit code is 1 if a model could not be deployed.
    """
    entries = _entries(server, checkpoints, deployment_file)
    for entry in entries:
        if dedicated:
            entry["dedicated"] = True
        if replicas is not None:
            entry["replicas"] = replicas
    wait = not no_wait
    body = {"deployments": entries, "generation": generation, "wait": wait, "sync": sync}
    answer = post_with_progress(server, "/admin/deploy", body, quiet=as_json or no_wait)
    report(answer, as_json, state="is loading" if no_wait else "is ready")


def _entries(
    server: ServerClient, checkpoints: tuple[str, ...], file: Path | None
) -> list[dict[str, Any]]:
    if bool(checkpoints) == (file is not None):
        raise click.UsageError("Give either CHECKPOINTs or a file with --deployment-config.")

    from ndif.schema.deployment_file import read_file, to_entry
    from ndif.schema.deployment_settings import parse_checkpoint

    configs = (
        read_file(file)
        if file is not None
        else [parse_checkpoint(each, here=server.is_local) for each in checkpoints]
    )
    if not configs:
        raise CommandError(f"{file} names no model.")
    return [to_entry(config) for config in configs]
