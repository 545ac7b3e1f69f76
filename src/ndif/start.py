"""`ndif start`: many models and many users on this machine, in this terminal or behind it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from ndif.config import Settings
from ndif.detached import detach
from ndif.gateway.origin import is_loopback
from ndif.preflight import Wanted, preflight
from ndif.run import Run
from ndif.serving import StartError
from ndif.session import Own, SessionError, Sessions
from ndif.session_record import Record
from ndif.variables import VariableError, read


@dataclass(frozen=True)
class Start:
    """One run of `ndif start`."""

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
        if sessions.running() is not None:
            raise StartError(sessions.occupied())
        wanted = Wanted(
            self.host, self.port or options.api_port, self.checkpoints, self.deployment_file
        )
        ready = preflight(options, wanted)
        with ready.listening:
            run = Run(options, wanted, ready, _session(sessions, console))
            if self.detach:
                self._say(detach(run), run.session)
            else:
                self._serve(run, console)

    def _serve(self, run: Run, console: Console) -> None:
        handler = RichHandler(console=console, show_path=False)
        handler.setLevel(logging.INFO if self.verbose else logging.WARNING)
        handler.setFormatter(logging.Formatter("%(message)s"))
        try:
            run.serve([handler], lambda record: _greet(record, run, console))
        finally:
            run.leave()
        console.print("Stopped.")

    def _say(self, record: Record, session: Own) -> None:
        if self.as_json:
            said = {
                "url": record.url,
                "pid": record.pid,
                "session": str(session.folder),
                "log": str(session.log()),
            }
            print(json.dumps(said))
        else:
            Console().print(
                f"Serving at [bold]{record.url}[/] (process {record.pid}).\nLog: {session.log()}",
                highlight=False,
                soft_wrap=True,
            )


def _settings() -> Settings:
    try:
        return read()
    except VariableError as error:
        raise StartError(str(error)) from error


def _session(sessions: Sessions, console: Console) -> Own:
    try:
        session = sessions.begin()
    except SessionError as error:
        raise StartError(str(error)) from error
    if session.stale is not None:
        console.print(
            f"The server of {session.stale.id} ended without a word; its place is taken over.",
            highlight=False,
        )
    return session


def _greet(record: Record, run: Run, console: Console) -> None:
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
    console.print("Ctrl-C stops it, and so does `ndif stop`.")
