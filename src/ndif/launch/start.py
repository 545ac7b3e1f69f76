"""`ndif start`: check the machine, make a run folder, then serve in this terminal or detached from it."""

from __future__ import annotations

import contextlib
import json
import logging

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from ndif.config.reference import read
from ndif.config.settings import Settings
from ndif.launch.access import prepare_access
from ndif.launch.cluster_secret import assignment, cluster_secrets, secret_file
from ndif.launch.detached import run_detached
from ndif.launch.preflight import ServerOptions, preflight
from ndif.launch.run import Run, ServerRun
from ndif.launch.run_folder import ActiveRunFolder, RunFolders, RunRecord
from ndif.launch.services import STANDALONE
from ndif.launch.waiting import waiting_for
from ndif.net import StartError, reachable_as
from ndif.telemetry.request_id import TERMINAL_FORMAT


def start(server: ServerOptions, *, detach: bool, as_json: bool, verbose: bool) -> None:
    """Serve until interrupted; with `detach`, return once another process serves."""
    console = Console(stderr=True)
    options = read()
    run_folders = RunFolders(options.session_root)
    if server.role in STANDALONE:
        run_folders = run_folders.of_service(server.role)
    if run_folders.running() is not None:
        raise StartError(run_folders.already_running())
    prepared = preflight(options, server)
    if prepared.warning is not None:
        console.print(f"[bold yellow]Warning:[/] {escape(prepared.warning)}", soft_wrap=True)
    logs = [] if server.is_server else [service.name for service in prepared.services]
    with (
        prepared.listening or contextlib.nullcontext(),
        prepared.admin or contextlib.nullcontext(),
    ):
        run_folder = _create(run_folders, console, *logs)
        if server.is_server:
            _prepare_access(options, run_folder)
        run = (ServerRun if server.is_server else Run)(options, run_folder, prepared)
        _run(run, console, detach, as_json, verbose)


def _prepare_access(options: Settings, run_folder: ActiveRunFolder) -> None:
    """Prepare the accounts in this process, before any other one has started."""
    try:
        prepare_access(options)
    except StartError:
        run_folder.discard()
        raise


def _run(run: Run, console: Console, detach: bool, as_json: bool, verbose: bool) -> None:
    started = [service.name for service in run.prepared.services]
    if run.prepared.server.is_server:
        started.append("the server")
    what = f"{', '.join(started)} to start; the log is {run.log}"
    if detach:
        with waiting_for(what):
            record = run_detached(run)
        _print_detached(record, run, as_json)
        return
    handler = RichHandler(console=console, show_path=False)
    handler.setLevel(logging.INFO if verbose else logging.WARNING)
    handler.setFormatter(logging.Formatter(TERMINAL_FORMAT))
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(waiting_for(what))

        def ready(record: RunRecord) -> None:
            waiting.close()
            _print_ready(record, run, console)

        try:
            run.serve([handler], ready)
        finally:
            run.close()
    console.print("Stopped.")


def _create(run_folders: RunFolders, console: Console, *logs: str) -> ActiveRunFolder:
    run_folder = run_folders.create(*logs)
    if run_folder.stale is not None:
        console.print(
            f"The server of {run_folder.stale.id} ended without shutting down; this one takes its place.",
            highlight=False,
        )
    return run_folder


def _print_detached(record: RunRecord, run: Run, as_json: bool) -> None:
    if as_json:
        session, log = str(run.run_folder.folder), str(run.log)
        print(json.dumps({"url": record.url, "pid": record.pid, "session": session, "log": log}))
        return
    Console().print(
        f"Serving at [bold]{record.url}[/] (process {record.pid}).\nLog: {run.log}",
        highlight=False,
        soft_wrap=True,
    )


def _print_ready(record: RunRecord, run: Run, console: Console) -> None:
    if isinstance(run, ServerRun):
        _print_server(record, run, console)
    else:
        role = run.prepared.server.role
        subject = "A worker of the cluster" if role == "worker" else f"The {role} is"
        console.print(
            f"{subject} at [bold]{record.url}[/].\nLog: {run.log}", highlight=False, soft_wrap=True
        )
    console.print("Ctrl-C stops it, and so does `ndif stop`.")


def _print_secret(run: ServerRun, console: Console) -> None:
    """Print the line that other machines of the server need, unless the operator gave it to this one."""
    file = secret_file(run.options)
    if not run.options.broker_url or not file.exists() or run.options.has_own_secret:
        return
    # The value is for a terminal, and not for a log.
    secret = cluster_secrets(run.options)[0] if console.is_terminal else f"$(cat {file})"
    console.print(
        "Another server with this broker, and a machine that joins this server's Ray cluster, needs:\n\n"
        f"    {assignment(secret)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _print_server(record: RunRecord, run: ServerRun, console: Console) -> None:
    reachable = reachable_as(run.prepared.server.host, run.options.public_url)
    if reachable and run.options.sandbox != "require":
        console.print(
            f"[bold yellow]Warning:[/] {reachable} is reachable from other machines, and untrusted code "
            f"runs without full confinement (NDIF_SANDBOX={run.options.sandbox}).",
            soft_wrap=True,
        )
    _print_secret(run, console)
    console.print(f"\nServing at [bold]{record.url}[/]. In your client:\n")
    url = run.options.public_url or record.url
    console.print(
        f"    export NDIF_HOST={url}\n"
        f"    export HF_ENDPOINT={url}/hub   # only where huggingface.co cannot be reached\n\n"
        "A model is loaded when its first request arrives. To load one before that:\n\n"
        "    ndif deploy openai-community/gpt2\n"
        "    ndif status\n\n"
        f"Log: {run.log}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
