"""`ndif start`: a server, a service of it or a node for it, in this terminal or behind it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from ndif.config import Settings
from ndif.gateway.origin import is_loopback
from ndif.gateway.serving import StartError
from ndif.launch.detached import detach
from ndif.launch.preflight import Wanted, preflight, preflight_of_services
from ndif.launch.run import Run
from ndif.launch.server_run import ServerRun
from ndif.launch.services_run import ServicesRun
from ndif.services.roles import ALONE, Role
from ndif.session.folder import Own, SessionError, Sessions
from ndif.session.record import Record
from ndif.variables import VariableError, read


@dataclass(frozen=True)
class Start:
    """One run of `ndif start`."""

    role: Role
    host: str
    port: int | None
    checkpoints: tuple[str, ...]
    deployment_file: Path | None
    detach: bool
    as_json: bool
    verbose: bool

    def run(self) -> None:
        """Serve until interrupted; with `detach`, until a process of its own serves.

        Raises:
            StartError: if the server cannot start. Nothing is left of it then.
        """
        console = Console(stderr=True)
        options = _settings()
        sessions = Sessions(options.session_root)
        if self.role in ALONE:
            sessions = sessions.of(self.role)
        if sessions.running() is not None:
            raise StartError(sessions.occupied())
        if self.role in ("all", "api"):
            self._start_server(options, sessions, console)
        else:
            services = preflight_of_services(options, self.role)
            logs = [service.name for service in services]
            session = _session(sessions, console, *logs)
            self._start(ServicesRun(options, self.role, session, services), console)

    def _start_server(self, options: Settings, sessions: Sessions, console: Console) -> None:
        wanted = Wanted(
            self.host,
            self.port or options.api_port,
            self.checkpoints,
            self.deployment_file,
            self.role,
        )
        ready = preflight(options, wanted)
        with ready.listening:
            session = _session(sessions, console)
            self._start(ServerRun(options, wanted, ready, session), console)

    def _start(self, run: Run, console: Console) -> None:
        if self.detach:
            self._say(detach(run), run)
        else:
            self._serve(run, console)

    def _serve(self, run: Run, console: Console) -> None:
        handler = RichHandler(console=console, show_path=False)
        handler.setLevel(logging.INFO if self.verbose else logging.WARNING)
        handler.setFormatter(logging.Formatter("%(message)s"))
        try:
            run.serve([handler], lambda record: self._greet(record, run, console))
        finally:
            run.leave()
        console.print("Stopped.")

    def _greet(self, record: Record, run: Run, console: Console) -> None:
        if isinstance(run, ServerRun):
            _greet(record, run, console)
        else:
            what = "A worker of the cluster" if self.role == "worker" else f"The {self.role} is"
            console.print(
                f"{what} at [bold]{record.url}[/].\nLog: {run.log}", highlight=False, soft_wrap=True
            )
        console.print("Ctrl-C stops it, and so does `ndif stop`.")

    def _say(self, record: Record, run: Run) -> None:
        if self.as_json:
            said = {
                "url": record.url,
                "pid": record.pid,
                "session": str(run.session.folder),
                "log": str(run.log),
            }
            print(json.dumps(said))
        else:
            Console().print(
                f"Serving at [bold]{record.url}[/] (process {record.pid}).\nLog: {run.log}",
                highlight=False,
                soft_wrap=True,
            )


def _settings() -> Settings:
    try:
        return read()
    except VariableError as error:
        raise StartError(str(error)) from error


def _session(sessions: Sessions, console: Console, *logs: str) -> Own:
    try:
        session = sessions.begin(*logs)
    except SessionError as error:
        raise StartError(str(error)) from error
    if session.stale is not None:
        console.print(
            f"The server of {session.stale.id} ended without a word; its place is taken over.",
            highlight=False,
        )
    return session


def _greet(record: Record, run: ServerRun, console: Console) -> None:
    host = run.wanted.host
    if not is_loopback(host) and run.options.sandbox != "require":
        console.print(
            f"[bold yellow]Warning:[/] {host} is not this machine alone, and strangers' code is not held "
            f"as it should be (NDIF_SANDBOX={run.options.sandbox}).",
            soft_wrap=True,
        )
    console.print(f"\nServing at [bold]{record.url}[/]. In your client:\n")
    console.print(
        f"    export NDIF_HOST={record.url}\n"
        f"    export HF_ENDPOINT={record.url}/hub   # only where huggingface.co is not to be reached\n\n"
        "A model is loaded when the first request for it comes, or before that:\n\n"
        "    ndif deploy openai-community/gpt2\n"
        "    ndif status\n\n"
        f"Log: {run.session.log()}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
