"""`ndif stop`: stop the server, its model processes and the services that were started with it."""

from __future__ import annotations

import click

from ndif.cli.output import show_json
from ndif.cli.server_client import connect, json_option, no_server, run_folders, token_option
from ndif.cli.shutdown import end, standalone_services, terminate


@click.command("stop")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="Seconds until a server that has not stopped is signalled.",
)
@click.option(
    "--url",
    metavar="URL",
    help="Address of a server elsewhere; default: what runs on this machine.",
)
@token_option
@json_option
def command(url: str | None, token: str | None, as_json: bool, timeout: float) -> None:
    """Stop the server with its model processes, then the services that were started on this machine."""
    running = run_folders().running()
    alone = standalone_services() if url is None else []
    stopped: dict[str, object] = {}
    if running is not None and running[1].node_type == "worker" and url is None:
        terminate(running[1])  # a worker answers no requests
        stopped = {"stopped": running[1].url, "how": "signal"}
        text = f"The worker of the cluster at {running[1].url} has stopped."
    elif running is not None or url is not None:
        server = connect(url, token)
        stopped = {"stopped": server.url, "how": end(server, timeout)}
        text = f"The server at {server.url} has stopped."
    elif not alone:
        raise no_server()
    if stopped and not as_json:
        click.echo(text)
    for name, record in alone:
        terminate(record)
        if not as_json:
            click.echo(f"The {name} at {record.url} has stopped.")
    if as_json:
        show_json({**stopped, "services": [name for name, _ in alone]})
