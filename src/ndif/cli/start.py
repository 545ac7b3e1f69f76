"""`ndif start`: a server of many models and many users, a service of it, or a node for it."""

from __future__ import annotations

from pathlib import Path

import click

from ndif.cli.output import warn_of_unread_variables
from ndif.launch.services import COMPONENTS, Role


@click.command("start")
@click.argument("words", nargs=-1, metavar=f"[{'|'.join(COMPONENTS)}] [CHECKPOINT]...")
@click.option("--worker", is_flag=True, help="Join the Ray cluster at NDIF_RAY_ADDRESS as a node.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port; default: NDIF_API_PORT, or 8001."
)
@click.option(
    "--deployment-config",
    "deployment_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML or JSON file of models to deploy at the start, with their settings.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="With NDIF_DEV_MODE=true: let other machines in, although nobody needs an API key.",
)
@click.option("--detach", is_flag=True, help="Serve detached from the terminal until `ndif stop`.")
@click.option("--json", "--json-output", "as_json", is_flag=True, help="With --detach: print JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show the log as well.")
def command(  # noqa: PLR0913 - each is an option of the command
    words: tuple[str, ...],
    worker: bool,
    host: str,
    port: int | None,
    deployment_file: Path | None,
    insecure: bool,
    detach: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Serve any model to many users; untrusted code runs confined.

    Each CHECKPOINT is deployed at the start and never evicted: a Hugging Face repo id, a model key, or
    ORG/NAME=FOLDER. Other models are loaded at their first request, or by `ndif deploy`.

    \b
    The first argument may name what to start:
      all           the server and its services (the default)
      api           the server alone
      broker        the broker of NDIF_BROKER_URL alone
      object-store  the object store of NDIF_OBJECT_STORE_URL alone
      ray           the head of the Ray cluster of NDIF_RAY_ADDRESS alone

    With `all`, a service starts if its variable gives an address of this machine at which nothing answers.
    """  # noqa: D301 - click reads the character
    if as_json and not detach:
        raise click.UsageError(
            "--json needs --detach: in the foreground nothing is printed for programs."
        )

    role, checkpoints = _role(words, worker)
    alone = role not in ("all", "api")
    if alone and (checkpoints or deployment_file or port):
        raise click.UsageError(
            f"Models and ports belong to a server, and {'--worker' if worker else words[0]} starts none."
        )

    from ndif.launch.preflight import ServerOptions
    from ndif.launch.start import start

    warn_of_unread_variables()
    server = ServerOptions(host, port, checkpoints, deployment_file, role, insecure)
    start(server, detach=detach, as_json=as_json, verbose=verbose)


def _role(words: tuple[str, ...], worker: bool) -> tuple[Role, tuple[str, ...]]:
    component = next((name for name in COMPONENTS if words[:1] == (name,)), None)
    if worker and component is not None:
        raise click.UsageError(f"--worker and {component} exclude each other.")
    if worker:
        return "worker", words
    return (component, words[1:]) if component is not None else ("all", words)
