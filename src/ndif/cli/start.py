"""`ndif start`: many models and many users; and what a server of many machines stands on."""

from __future__ import annotations

from pathlib import Path

import click

from ndif.services.roles import WORDS, Role


@click.command("start")
@click.argument("words", nargs=-1, metavar=f"[{'|'.join(WORDS)}] [CHECKPOINT]...")
@click.option("--worker", is_flag=True, help="Join the Ray cluster at NDIF_RAY_ADDRESS as a node.")
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
    words: tuple[str, ...],
    worker: bool,
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

    A first word says what is started: api, the server; broker, object-store or ray, that service alone;
    all, or none of these words, the server and each service that NDIF_BROKER_URL, NDIF_OBJECT_STORE_URL
    or NDIF_RAY_ADDRESS has on this machine and that does not answer there yet.
    """
    if as_json and not detach:
        raise click.UsageError(
            "--json is for --detach: in the foreground nothing is printed for programs."
        )

    role, checkpoints = _role(words, worker)
    alone = role not in ("all", "api")
    if alone and (checkpoints or deployment_file or port):
        raise click.UsageError(
            f"Models and ports are a server's, and {'--worker' if worker else words[0]} starts none."
        )

    from ndif.cli.output import warn_of_unread
    from ndif.gateway.serving import StartError
    from ndif.launch.start import Start

    warn_of_unread()
    try:
        Start(role, host, port, checkpoints, deployment_file, detach, as_json, verbose).run()
    except StartError as error:
        raise click.ClickException(str(error)) from error


def _role(words: tuple[str, ...], worker: bool) -> tuple[Role, tuple[str, ...]]:
    """What is to be started, and the checkpoints."""
    # A checkpoint has a / or a = in it, or is no word at all.
    word = next((word for word in WORDS if words[:1] == (word,)), None)
    if worker and word is not None:
        raise click.UsageError(f"--worker starts a worker, and {word} something else.")
    if worker:
        return "worker", words
    return (word, words[1:]) if word is not None else ("all", words)
