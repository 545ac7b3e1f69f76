"""`ndif start`: check the machine, make a run folder, then serve in this terminal or detached from it."""

from __future__ import annotations

import contextlib
import json
import logging
import os

from rich.console import Console
from rich.markup import escape

from ndif.config.reference import name_of, read
from ndif.config.settings import settings
from ndif.launch.access import ClientLines, prepare_access
from ndif.launch.cluster_secret import assignment, cluster_secrets, secret_file
from ndif.launch.detached import run_detached
from ndif.launch.preflight import ServerOptions, preflight
from ndif.launch.run import ServerRun, ServiceRun
from ndif.launch.run_folder import ActiveRunFolder, RunFolders, RunRecord
from ndif.launch.services import STANDALONE
from ndif.launch.services.ray import own_head
from ndif.launch.waiting import waiting_for
from ndif.net import StartError, reachable_as
from ndif.telemetry import logs


def start(server: ServerOptions, *, detach: bool, as_json: bool, verbose: bool) -> None:
    """Serve until interrupted; with `detach`, return once another process serves."""
    console = Console(stderr=True)
    options = read()
    if server.is_server and (head := own_head(options)) is not None:
        variable = name_of("ray_address")
        console.print(
            f"Nothing answers at {options.ray_address} ({variable}): the head of the Ray cluster is at "
            f"{head}.",
            highlight=False,
            soft_wrap=True,
        )
        os.environ[variable] = head  # the processes of this server read it, too
        settings.cache_clear()
        options = read()
    run_folders = RunFolders(options.session_root)
    if server.role in STANDALONE:
        run_folders = run_folders.of_service(server.role)
    if run_folders.running() is not None:
        raise StartError(run_folders.already_running())
    prepared = preflight(options, server)
    if prepared.warning is not None:
        console.print(f"[bold yellow]Warning:[/] {escape(prepared.warning)}", soft_wrap=True)
    names = [] if server.is_server else [service.name for service in prepared.services]
    with (
        prepared.listening or contextlib.nullcontext(),
        prepared.admin or contextlib.nullcontext(),
    ):
        run_folder = _create(run_folders, console, *names)
        run = (ServerRun if server.is_server else ServiceRun)(options, run_folder, prepared)
        lines = _prepare_access(run) if isinstance(run, ServerRun) else None
        _run(run, console, lines, detach, as_json, verbose)


def _prepare_access(run: ServerRun) -> ClientLines | None:
    """Prepare the accounts in this process, before any other one has started."""
    try:
        return prepare_access(run.options, run.options.public_url or run.url)
    except BaseException:
        run.close()
        raise


def _run(
    run: ServiceRun,
    console: Console,
    lines: ClientLines | None,
    detach: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    started = [service.name for service in run.prepared.services]
    if run.prepared.server.is_server:
        started.append("the server")
    subject = f"{', '.join(started)} to start; the log is {run.log}"
    if isinstance(run, ServerRun):
        _warn_if_open(run, console)
    if detach:
        with waiting_for(subject):
            record = run_detached(run)
        _print_detached(record, run, lines, as_json)
        return
    handler = logs.for_console(console)
    handler.setLevel(logging.INFO if verbose else logging.WARNING)
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(waiting_for(subject))

        def ready(record: RunRecord) -> None:
            waiting.close()
            _print_ready(record, run, lines, console)

        try:
            run.serve([handler], ready)
        finally:
            run.close()
    console.print("Stopped.")


def _create(run_folders: RunFolders, console: Console, *names: str) -> ActiveRunFolder:
    run_folder = run_folders.create(*names)
    if run_folder.stale is not None:
        console.print(
            f"The server of {run_folder.stale.id} ended without shutting down; this one takes its place.",
            highlight=False,
        )
    return run_folder


def _print_detached(
    record: RunRecord, run: ServiceRun, lines: ClientLines | None, as_json: bool
) -> None:
    if as_json:
        answer = {
            "url": record.url,
            "pid": record.pid,
            "session": str(run.run_folder.folder),
            "log": str(run.log),
            "client_file": str(lines.file) if lines else None,
        }
        print(json.dumps(answer))
        return
    console = Console()
    if isinstance(run, ServerRun):
        _print_secret(run, console)
    console.print(
        f"{run.is_up} at [bold]{record.url}[/] (process {record.pid}).\nLog: {run.log}",
        highlight=False,
        soft_wrap=True,
    )
    if lines is not None:
        console.print(
            f"In your client:\n\n    export NDIF_HOST={run.options.public_url or record.url}\n"
            f"{_key_line(lines, console)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _key_line(lines: ClientLines, console: Console) -> str:
    """Return the line that gives a client its key; show the key itself on a terminal only, not in a log."""
    if lines.first_key is not None and console.is_terminal:
        return f"    export NDIF_API_KEY={lines.first_key}   # the first key; it is kept in {lines.file}\n"
    return f"    . {lines.file}   # sets NDIF_HOST, and NDIF_API_KEY to the key that the first start made\n"


def _print_ready(
    record: RunRecord, run: ServiceRun, lines: ClientLines | None, console: Console
) -> None:
    if isinstance(run, ServerRun):
        _print_server(record, run, lines, console)
    else:
        console.print(
            f"{run.is_up} at [bold]{record.url}[/].\nLog: {run.log}",
            highlight=False,
            soft_wrap=True,
        )
    console.print("Ctrl-C stops it, and so does `ndif stop`.")


def _print_secret(run: ServerRun, console: Console) -> None:
    """Print the line that sets the secret on other machines, unless the operator chose the secret."""
    file = secret_file(run.options)
    if not run.options.broker_url or not file.exists() or run.options.has_own_secret:
        return
    # Show the value on a terminal only, not in a log.
    secret = cluster_secrets(run.options)[0] if console.is_terminal else f"$(cat {file})"
    console.print(
        "Another server with this broker, and a machine that joins this server's Ray cluster, needs:\n\n"
        f"    {assignment(secret)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _warn_if_open(run: ServerRun, console: Console) -> None:
    reachable = reachable_as(run.prepared.server.host, run.options.public_url)
    if reachable and run.options.sandbox != "require":
        console.print(
            f"[bold yellow]Warning:[/] {reachable} is reachable from other machines, and untrusted code "
            f"runs without full confinement (NDIF_SANDBOX={run.options.sandbox}).",
            soft_wrap=True,
        )


def _print_server(
    record: RunRecord, run: ServerRun, lines: ClientLines | None, console: Console
) -> None:
    _print_secret(run, console)
    console.print(f"\nServing at [bold]{record.url}[/]. In your client:\n")
    url = run.options.public_url or record.url
    console.print(
        f"    export NDIF_HOST={url}\n"
        f"{_key_line(lines, console) if lines else ''}"
        f"    export HF_ENDPOINT={url}/hub   # only where huggingface.co cannot be reached\n\n"
        "A model is loaded when its first request arrives. To load one before that:\n\n"
        "    ndif deploy openai-community/gpt2\n"
        "    ndif status\n\n"
        f"Log: {run.log}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
