"""`ndif start`: check the machine, make a run folder, then serve in this terminal or detached from it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from rich.console import Console
from rich.logging import RichHandler

from ndif.config.reference import read
from ndif.launch.detached import detach
from ndif.launch.preflight import ServerOptions, preflight, preflight_of_services
from ndif.launch.run import Run, ServerRun
from ndif.launch.run_folder import ActiveRunFolder, RunFolders, RunRecord
from ndif.launch.services import STANDALONE
from ndif.net import StartError, is_loopback


@dataclass(frozen=True)
class Start:
    """One invocation of `ndif start`."""

    server: ServerOptions
    detach: bool
    as_json: bool
    verbose: bool

    def run(self) -> None:
        """Serve until interrupted; with `detach`, return once another process serves.

        Raises:
            NdifError: If the server cannot start. Nothing is left of it then.
        """
        console = Console(stderr=True)
        options, role = read(), self.server.role
        run_folders = RunFolders(options.session_root)
        if role in STANDALONE:
            run_folders = run_folders.of_service(role)
        if run_folders.running() is not None:
            raise StartError(run_folders.already_running())
        if not self.server.is_server:
            services = preflight_of_services(options, role)
            run_folder = _create(run_folders, console, *(service.name for service in services))
            self._start(Run(options, role, run_folder, services), console)
            return
        prepared = preflight(options, self.server)
        with prepared.listening:
            run_folder = _create(run_folders, console)
            self._start(ServerRun(options, self.server, prepared, run_folder), console)

    def _start(self, run: Run, console: Console) -> None:
        if self.detach:
            self._print_detached(detach(run), run)
            return
        handler = RichHandler(console=console, show_path=False)
        handler.setLevel(logging.INFO if self.verbose else logging.WARNING)
        handler.setFormatter(logging.Formatter("%(message)s"))
        try:
            run.serve([handler], lambda record: _print_ready(record, run, console))
        finally:
            run.close()
        console.print("Stopped.")

    def _print_detached(self, record: RunRecord, run: Run) -> None:
        if self.as_json:
            answer = {
                "url": record.url,
                "pid": record.pid,
                "session": str(run.run_folder.folder),
                "log": str(run.log),
            }
            print(json.dumps(answer))
        else:
            Console().print(
                f"Serving at [bold]{record.url}[/] (process {record.pid}).\nLog: {run.log}",
                highlight=False,
                soft_wrap=True,
            )


def _create(run_folders: RunFolders, console: Console, *logs: str) -> ActiveRunFolder:
    run_folder = run_folders.create(*logs)
    if run_folder.stale is not None:
        console.print(
            f"The server of {run_folder.stale.id} ended without shutting down; this one takes its place.",
            highlight=False,
        )
    return run_folder


def _print_ready(record: RunRecord, run: Run, console: Console) -> None:
    if isinstance(run, ServerRun):
        _print_server(record, run, console)
    else:
        subject = "A worker of the cluster" if run.role == "worker" else f"The {run.role} is"
        console.print(
            f"{subject} at [bold]{record.url}[/].\nLog: {run.log}", highlight=False, soft_wrap=True
        )
    console.print("Ctrl-C stops it, and so does `ndif stop`.")


def _print_server(record: RunRecord, run: ServerRun, console: Console) -> None:
    host = run.server.host
    if not is_loopback(host) and run.options.sandbox != "require":
        console.print(
            f"[bold yellow]Warning:[/] {host} is reachable from other machines, and untrusted code runs "
            f"without full confinement (NDIF_SANDBOX={run.options.sandbox}).",
            soft_wrap=True,
        )
    console.print(f"\nServing at [bold]{record.url}[/]. In your client:\n")
    console.print(
        f"    export NDIF_HOST={record.url}\n"
        f"    export HF_ENDPOINT={record.url}/hub   # only where huggingface.co cannot be reached\n\n"
        "A model is loaded when its first request arrives. To load one before that:\n\n"
        "    ndif deploy openai-community/gpt2\n"
        "    ndif status\n\n"
        f"Log: {run.log}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
