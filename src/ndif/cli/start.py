"""`ndif start`: a server for many models and users, one of its services, or one of its nodes."""

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
    help="YAML or JSON file of models to deploy at the start, and their settings.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="With NDIF_DEV_MODE=true: accept other machines, although no API key is required.",
)
@click.option("--detach", is_flag=True, help="Run detached from the terminal until `ndif stop`.")
@click.option("--json", "--json-output", "as_json", is_flag=True, help="With --detach: print JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show the log.")
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
    ORG/NAME=FOLDER. Other models are loaded by their first request, or by `ndif deploy`.

    \b
    The first argument may name one part to start:
      all           the server and its services (default).
      api           only the server.
      broker        only the broker of NDIF_BROKER_URL.
      object-store  only the object store of NDIF_OBJECT_STORE_URL.
      ray           only the head of the Ray cluster of NDIF_RAY_ADDRESS.

    With `all`, a service starts if its variable is an address of this machine at which no service answers.
    """  # noqa: D301 - click reads the character
    if as_json and not detach:
        raise click.UsageError("--json needs --detach: a server in the foreground prints no JSON.")

    role, checkpoints = _role(words, worker)
    alone = role not in ("all", "api")
    if alone and (checkpoints or deployment_file or port):
        raise click.UsageError(
            f"{'--worker' if worker else words[0]} starts no server, so it takes no models and no port."
        )

    from ndif.launch.preflight import ServerOptions
    from ndif.launch.start import start

    warn_of_unread_variables()
    server = ServerOptions(host, port, checkpoints, deployment_file, role, insecure)
    start(server, detach=detach, as_json=as_json, verbose=verbose)


def _role(words: tuple[str, ...], worker: bool) -> tuple[Role, tuple[str, ...]]:
    component = next((name for name in COMPONENTS if words[:1] == (name,)), None)
    if worker and component is not None:
        raise click.UsageError(f"--worker and {component} cannot be combined.")
    if worker:
        return "worker", words
    return (component, words[1:]) if component is not None else ("all", words)
