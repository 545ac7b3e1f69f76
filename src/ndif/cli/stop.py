"""`ndif stop`."""

from __future__ import annotations

import click

from ndif.cli.admin import connect, nothing_runs, options


@click.command("stop")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How long it may take to end by itself.",
)
@click.option("--url", metavar="URL", help="A server elsewhere; default: what runs here.")
@click.option(
    "--token",
    metavar="TOKEN",
    help="Its token, or @FILE to read it from there; default: that of the server here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(url: str | None, token: str | None, as_json: bool, timeout: float) -> None:
    """Stop the server, with its model processes, and then the services that were started here."""
    from ndif.cli.ending import end, end_worker, services, terminate
    from ndif.cli.output import show_json
    from ndif.session.folder import Sessions

    sessions = Sessions(options().session_root)
    running = sessions.running()
    alone = services(sessions) if url is None else []
    said: dict[str, object] = {}
    if running is not None and running[1].node_type == "worker" and url is None:
        said = {"stopped": running[1].url, "how": end_worker(running[1])}
        text = f"The worker of the cluster at {running[1].url} has stopped."
    elif running is not None or url is not None:
        server = connect(url, token)
        said = {"stopped": server.url, "how": end(server, timeout)}
        text = f"The server at {server.url} has stopped."
    elif not alone:
        raise nothing_runs(sessions.root)
    if said and not as_json:
        click.echo(text)
    for name, record in alone:
        terminate(record)
        if not as_json:
            click.echo(f"The {name} at {record.url} has stopped.")
    if as_json:
        show_json({**said, "services": [name for name, _ in alone]})
