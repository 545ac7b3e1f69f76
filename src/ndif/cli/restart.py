"""`ndif restart`: restart the server, a service, or the replicas of one model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from ndif.cli import stop
from ndif.cli.main import complete_models
from ndif.cli.output import show_answer, show_json, variant_name
from ndif.cli.server_client import (
    CommandError,
    RefusedCommandError,
    ServerClient,
    connect,
    json_option,
    no_server,
    read,
    run_folders,
    token_option,
    url_option,
)
from ndif.config.short_ids import unique_length
from ndif.config.units import format_duration
from ndif.launch.run_folder import LOG_NAMES, RunFolder, RunRecord, log_end
from ndif.launch.services import COMPONENTS, STANDALONE
from ndif.launch.waiting import waiting_for

_RESTART_S = 90.0
_POLL_S = 0.1


@click.command("restart")
@click.argument("target", required=False, metavar="[SERVICE|MODEL]", shell_complete=complete_models)
@click.option(
    "--generation",
    metavar="0.7",
    help="Restart only MODEL's replicas for clients of this nnsight generation.",
)
@url_option
@token_option
@json_option
def command(
    target: str | None, generation: str | None, url: str | None, token: str | None, as_json: bool
) -> None:
    """Restart a service, the replicas of MODEL, or, without an argument, the server.

    SERVICE is api, dispatcher, broker, object-store or ray. A service restarts in place and keeps its data;
    the other services keep running. A server restarts detached from the terminal. It keeps the options and
    the environment of its first start, and deploys the models that are deployed now.
    """
    if generation is not None and target in (None, "all", *LOG_NAMES):
        raise click.UsageError("--generation needs a MODEL.")
    if target in LOG_NAMES:
        _restart_service(target, url, token, as_json)
    elif target in (None, "all"):
        _restart_server(connect(url, token), as_json)
    else:
        _restart_model(connect(url, token), target, generation, as_json)


def _restart_model(server: ServerClient, model: str, generation: str | None, as_json: bool) -> None:
    from ndif.control.answers import Restarted

    body = {"model": model, "generation": generation}
    content = server.post("/admin/restart", body, awaited="replicas to be replaced")
    answer = read(Restarted, content)
    length = unique_length(replica.replica_id for replica in answer.restarted)
    show_answer(
        answer,
        as_json,
        (
            f"{variant_name(replica.model_key)}: replica {replica.replica_id[:length]} restarts."
            for replica in answer.restarted
        ),
    )


def _restart_service(name: str, url: str | None, token: str | None, as_json: bool) -> None:
    """Stop the processes of a service one after the other; the supervisor restarts each."""
    from ndif.launch.services.plan import service_status
    from ndif.launch.services.processes import processes_of
    from ndif.server.process_config import came_up

    if url is not None:
        raise RefusedCommandError("A service can only be restarted on its own machine.")
    folders = run_folders()
    alone = folders.of_service(name).running() if name in STANDALONE else None
    running = alone or folders.running()
    if running is None:
        raise no_server()
    run_folder, record = running
    if name in STANDALONE:
        is_here = name in record.services and record.services[name].ours
    elif "broker" not in record.services:
        # A server without a broker is one process.
        _restart_server(connect(None, token), as_json)
        return
    else:
        is_here = record.node_type == "head"
    if not is_here:
        raise CommandError(
            f"{run_folder.id} started no {name}. Restart the {name} on the machine where it runs."
        )

    def processes() -> list[int]:
        return processes_of(record.pid, name)

    def is_up(process: int, since: float) -> bool:
        if name in STANDALONE:
            return service_status(folders)[name].answers is not False
        return came_up(run_folder.service_data("processes"), process, since)

    log = run_folder.log(name)
    # If there is no process, the last one has just ended, and the supervisor is about to start another.
    pids: list[int | None] = [*processes()]
    for process in pids or [None]:
        _restart_process(name, process, processes, is_up, log)
    if as_json:
        show_json({"restarted": name, "processes": processes()})
    else:
        click.echo(f"The {name} has restarted.")


def _restart_process(
    name: str,
    process: int | None,
    processes: Callable[[], list[int]],
    is_up: Callable[[int, float], bool],
    log: Path,
) -> None:
    """Stop `process` and return once its successor is up; raise if the successor ends or is late."""
    began = time.time()
    before = {*processes(), process}
    try:
        if process is not None:
            os.kill(process, signal.SIGTERM)
    except PermissionError as error:
        raise CommandError(f"Process {process} belongs to another user.") from error
    except ProcessLookupError:
        pass
    started: set[int] = set()
    awaited = f"process {process} of the {name} to end, and another" if process else f"the {name}"
    with waiting_for(f"{awaited} to start"):
        while time.time() < began + _RESTART_S:
            current = {*processes()}
            if process not in current and any(is_up(pid, began) for pid in current - before):
                return
            if started - current:
                raise CommandError(
                    "\n".join(
                        [
                            f"The {name} restarted, but ended before it was ready. Its supervisor keeps "
                            f"restarting it. The log {log} ends with:",
                            *log_end(log),
                        ]
                    )
                )
            started |= current - before
            time.sleep(_POLL_S)
    raise CommandError(
        f"The {name} is not ready after {format_duration(_RESTART_S)}; its log is {log}."
    )


def _restart_server(server: ServerClient, as_json: bool) -> None:
    running = run_folders().running()
    if not server.is_local or running is None:
        raise RefusedCommandError(
            "A server can only be restarted on its own machine. `ndif restart MODEL` restarts the replicas "
            "of a model from here."
        )
    run_folder, record = running
    # Read while the server runs: this command's own environment may differ.
    environment = _environment(record.pid)
    _warn_of_unused_variables(environment)
    arguments = _arguments(server, run_folder, record)
    stop.end(server)
    completed = subprocess.run(  # noqa: S603 - this interpreter, with the arguments of the first start
        [
            *(sys.executable, "-m", "ndif", "start", "--detach", *arguments),
            *(["--json"] if as_json else []),
        ],
        env=environment,
        check=False,
    )
    if completed.returncode != 0:
        raise CommandError("The server stopped, but did not restart.")


def _arguments(server: ServerClient, run_folder: RunFolder, record: RunRecord) -> list[str]:
    """Return the arguments of the first start, with the models deployed now if the server lists them."""
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
            "The server is not restarted, because the models that are deployed now could not be deployed "
            f"again:\n{error}"
        ) from error
    component = [word for word in record.arguments[:1] if word in COMPONENTS]
    address = ["--host", record.host, "--port", str(record.port)]
    insecure = [word for word in record.arguments if word == "--insecure"]
    return [*component, *address, *insecure, "--deployment-config", str(file)]


def _warn_of_unused_variables(environment: Mapping[str, str]) -> None:
    """Print the variables of this command's environment that the restarted server will not use."""
    from ndif.config.reference import name_of
    from ndif.config.settings import Settings

    names = map(name_of, Settings.model_fields)
    others = [n for n in names if n in os.environ and os.environ[n] != environment.get(n)]
    if others:
        click.echo(
            f"The server keeps the environment of its first start and ignores the values here of "
            f"{', '.join(others)}. To use them, run `ndif stop` and `ndif start`.",
            err=True,
        )


def _environment(pid: int) -> dict[str, str]:
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError as error:
        raise CommandError(
            f"The environment of process {pid} cannot be read: {error.strerror}."
        ) from error
    pairs = (entry.partition("=") for entry in os.fsdecode(content).split("\0"))
    return {name: value for name, equals, value in pairs if equals}
