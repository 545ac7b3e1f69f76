"""`ndif stop`: stop the server and its services, and with --services also services started alone."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Literal

import click

from ndif.cli.durations import DurationParam
from ndif.cli.output import show_json
from ndif.cli.server_client import (
    CommandError,
    NoServerError,
    ServerClient,
    connect,
    json_option,
    no_server,
    run_folders,
    token_option,
)
from ndif.config.units import format_duration
from ndif.launch.run_folder import RunRecord, within
from ndif.launch.services import STANDALONE
from ndif.launch.waiting import waiting_for

_TIMEOUT_S = 30
_SIGNAL_TIMEOUT_S = 60
_ASK_TIMEOUT_S = 5.0


@click.command("stop")
@click.option(
    "--timeout",
    type=DurationParam(),
    default=f"{_TIMEOUT_S}s",
    metavar="DURATION",
    help="Time to wait for the server to stop before it receives a signal, such as 2m.",
)
@click.option(
    "--url",
    metavar="URL",
    help="Address of another server; default: the server of this machine.",
)
@click.option(
    "--services",
    "with_services",
    is_flag=True,
    help="Then also stop the services that were started alone on this machine, such as a broker with "
    "its queue.",
)
@token_option
@json_option
def command(
    url: str | None, token: str | None, as_json: bool, timeout: float, with_services: bool
) -> None:
    """Stop the server, its model processes, and the services that were started with it."""
    if with_services and url is not None:
        raise click.UsageError(
            "--services stops services of this machine, so it cannot be combined with --url."
        )
    running = run_folders().running()
    services = _standalone_services() if url is None else []
    alone = services if with_services else []
    stopped: dict[str, object] = {}
    if running is not None and running[1].node_type == "worker" and url is None:
        _terminate(running[1])  # a worker answers no requests
        stopped = {"stopped": running[1].url, "how": "signal"}
        text = f"The worker of the cluster at {running[1].url} has stopped."
    elif running is not None or url is not None:
        server = connect(url, token)
        stopped = {"stopped": server.url, "how": end(server, timeout)}
        text = f"The server at {server.url} has stopped."
    elif services and not alone:
        raise NoServerError(f"No server is running here. {_running_sentence(services)}")
    elif not alone:
        raise no_server()
    if stopped and not as_json:
        click.echo(text)
    for name, record in alone:
        _terminate(record)
        if not as_json:
            click.echo(f"The {name} at {record.url} has stopped.")
    if as_json:
        show_json({**stopped, "services": [name for name, _ in alone]})
    elif services and not alone:
        click.echo(_running_sentence(services))


def end(server: ServerClient, timeout_s: float = _TIMEOUT_S) -> Literal["asked", "signal"]:
    """Ask a server to stop, and wait until it stops; signal a local server that does not stop in time."""
    if not server.is_local:
        server.post("/admin/stop", {})
        with waiting_for(f"the server at {server.url} to stop"):
            has_stopped = within(timeout_s, lambda: not _answers(server))
        if not has_stopped:
            raise CommandError(
                f"The server at {server.url} agreed to stop, but still answers after "
                f"{format_duration(timeout_s)}."
            )
        return "asked"

    running = run_folders().running()
    if running is None:
        return "asked"
    _, record = running
    # A server that does not answer, or whose token cannot be read, still receives a signal.
    with contextlib.suppress(CommandError):
        server.post("/admin/stop", {}, timeout_s=_ASK_TIMEOUT_S)
        with waiting_for(f"the server at {record.url} (process {record.pid}) to stop"):
            has_stopped = within(timeout_s, lambda: not record.is_alive)
        if has_stopped:
            return "asked"
    _terminate(record)
    return "signal"


def _standalone_services() -> list[tuple[str, RunRecord]]:
    """Return the services that run without a server, in stop order."""
    runs = ((name, run_folders().of_service(name).running()) for name in reversed(STANDALONE))
    return [(name, running[1]) for name, running in runs if running is not None]


def _running_sentence(services: list[tuple[str, RunRecord]]) -> str:
    text = " and ".join(f"the {name} at {record.url}" for name, record in services)
    runs, them = ("run", "them") if len(services) > 1 else ("runs", "it")
    return f"{text[0].upper()}{text[1:]} still {runs}; `ndif stop --services` stops {them}."


def _terminate(record: RunRecord) -> None:
    """Send SIGTERM to the process of a run, and wait for its end. A process that reused the PID is safe."""
    try:
        if record.is_alive:
            os.kill(record.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise CommandError(f"Process {record.pid} belongs to another user.") from error
    with waiting_for(f"process {record.pid} ({record.url}) to end"):
        has_ended = within(_SIGNAL_TIMEOUT_S, lambda: not record.is_alive)
    if not has_ended:
        raise CommandError(
            f"Process {record.pid} has not ended {format_duration(_SIGNAL_TIMEOUT_S)} after SIGTERM. See "
            f"`ndif logs` for the reason; `kill -9 {record.pid}` ends the process at once."
        )


def _answers(server: ServerClient) -> bool:
    try:
        server.get("/ping")
    except CommandError:
        return False
    return True
