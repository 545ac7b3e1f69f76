"""`ndif start`: many models and many users, on this machine."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("start")
@click.argument("checkpoints", nargs=-1, metavar="[CHECKPOINT]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port; default: NDIF_API_PORT, or 8001."
)
@click.option(
    "--deployment-config",
    "deployment_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A YAML or JSON file of models and their settings, to be deployed at the start.",
)
@click.option("--detach", is_flag=True, help="Serve behind the terminal, until `ndif stop`.")
@click.option("--json", "as_json", is_flag=True, help="With --detach: print JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show the log as well.")
def command(
    checkpoints: tuple[str, ...],
    host: str,
    port: int | None,
    deployment_file: Path | None,
    detach: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Serve any model to many users; strangers' code is confined.

    Each CHECKPOINT is deployed at the start and stays: a Hugging Face repo id, a model key, or
    ORG/NAME=FOLDER. Other models are loaded when a request for them comes, or by `ndif deploy`.
    """
    if as_json and not detach:
        raise click.UsageError(
            "--json is for --detach: in the foreground nothing is printed for programs."
        )

    from ndif.serving import StartError
    from ndif.start import Start

    try:
        Start(host, port, checkpoints, deployment_file, detach, as_json, verbose).run()
    except StartError as error:
        raise click.ClickException(str(error)) from error
