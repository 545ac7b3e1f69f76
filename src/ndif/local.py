"""The local server in a terminal: a free port, a progress bar, what a client needs, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop
from pydantic import ValidationError
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ndif.cluster.controller import DeploymentError
from ndif.config import Settings, settings
from ndif.gateway.origin import is_loopback
from ndif.sandbox.confinement import ConfinementError, verify
from ndif.schema.deployment import DeploymentConfig, task_of
from ndif.server import Server

_FIRST_PORT = 8289
_LAST_PORT = 65535
_GENERATION = "0.8"
"""The generation whose model process starts with the server; others start with their first client."""


class LocalError(Exception):
    """The server cannot start; the message says what to do."""


@dataclass(frozen=True)
class Local:
    """One run of `ndif local start`."""

    checkpoint: str
    name: str | None
    host: str
    port: int | None
    dtype: str
    device: str | None
    revision: str | None
    task: str | None
    threads: int
    replicas: int
    results: Path | None
    share_weights: bool
    sandbox: bool
    execution_timeout_s: float | None
    verbose: bool

    def run(self) -> None:
        """Serve until interrupted.

        Raises:
            LocalError: if the server cannot start.
        """
        console = Console(stderr=True)
        logging.basicConfig(
            level=logging.INFO if self.verbose else logging.WARNING,
            handlers=[RichHandler(console=console, show_path=False)],
            format="%(message)s",
        )
        config = self.deployment()
        options = _settings()
        if self.sandbox:
            _verify(options)
        with listen(self.host, self.port) as listening:
            if not is_loopback(self.host) and not self.sandbox:
                console.print(
                    f"[bold yellow]Warning:[/] {self.host} is not this machine alone. Whoever reaches the "
                    "port runs code here as you: local mode trusts its user."
                )
            results = self._results_folder()
            try:
                server = Server(
                    config,
                    options,
                    results,
                    loopback=is_loopback(self.host),
                    trusted=not self.sandbox,
                    share_weights=self.share_weights,
                )
                uvloop.run(self._serve(server, listening, console))
            finally:
                if self.results is None:
                    shutil.rmtree(results, ignore_errors=True)

    def _results_folder(self) -> Path:
        folder = self.results
        if folder is None:
            return Path(tempfile.mkdtemp(prefix="ndif-results-"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            raise LocalError(
                f"Results cannot be kept in {folder} ({error.strerror}). Choose another --results-dir."
            ) from error

    def deployment(self) -> DeploymentConfig:
        """What the options ask for.

        Raises:
            LocalError: if they contradict each other.
        """
        folder = Path(self.checkpoint).expanduser()
        is_folder = folder.is_dir()
        if is_folder and not (folder / "config.json").is_file():
            raise LocalError(f"{folder} holds no config.json: it is not a checkpoint's folder.")
        if not is_folder and self.checkpoint.startswith((".", "/", "~")):
            raise LocalError(f"There is no folder {folder}.")
        if is_folder and not self.name:
            raise LocalError(
                f"{folder} is a folder, and clients ask for a model by name: add --name ORG/NAME."
            )
        if not is_folder and self.name and self.name != self.checkpoint:
            raise LocalError("--name is for a folder; a repository is asked for by its own id.")
        return DeploymentConfig(
            repo_id=self.name or self.checkpoint,
            checkpoint=str(folder.resolve()) if is_folder else self.checkpoint,
            revision=self.revision,
            task=self.task or (task_of(folder / "config.json") if is_folder else None),
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            replicas=self.replicas,
            execution_timeout_s=self.execution_timeout_s,
        )

    async def _serve(self, server: Server, listening: socket.socket, console: Console) -> None:
        http = _Http(server.http(listening).config)
        serving = asyncio.create_task(http.serve(sockets=[listening]))
        loading = asyncio.create_task(self._load(server, listening, console))
        try:
            await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await serving
        finally:
            loading.cancel()
            http.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(serving, loading, return_exceptions=True)
            console.print("Stopped.")

    async def _load(self, server: Server, listening: socket.socket, console: Console) -> None:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        with bar:
            task = bar.add_task(f"Loading {self.checkpoint}", total=None)
            try:
                for replica_id in server.controller.replica_ids(_GENERATION):
                    actor = await server.controller.deploy(
                        _GENERATION,
                        replica_id,
                        lambda done, total: bar.update(task, completed=done, total=total),
                    )
            except DeploymentError as error:
                raise LocalError(str(error)) from error
        model = actor.process.model
        server.share(Path(model["folder"]))
        console.print(
            f"Loaded [bold]{server.controller.config.repo_id}[/]: {model['parameters'] / 1e6:,.0f} M "
            f"parameters, {model['dtype']} on {model['device']}, "
            f"weights in {actor.process.load_s:.1f} s, "
            f"ready {time.time() - actor.process.loaded_at:.1f} s later{_times(self.replicas)}",
            soft_wrap=True,
        )
        self._greet(server, listening, console)

    def _greet(self, server: Server, listening: socket.socket, console: Console) -> None:
        url = f"http://{_for_url(self.host)}:{listening.getsockname()[1]}"
        config = server.controller.config
        console.print(f"\nServing at [bold]{url}[/]. In your client:\n")
        console.print(
            f"    export NDIF_HOST={url}\n"
            f"    export HF_ENDPOINT={url}/hub   # only where huggingface.co is not to be reached\n\n"
            f'    model = TransformersModel("{config.repo_id}")\n'
            '    with model.trace("The Eiffel Tower is in", remote=True):\n'
            "        logits = model.output.logits.save()\n",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        console.print("Ctrl-C stops it.")


def _times(replicas: int) -> str:
    return f", {replicas} times" if replicas > 1 else ""


class _Http(uvicorn.Server):
    """Ends on the first signal without passing it on: the rest of the shutdown is ours."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """See `uvicorn.Server`."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        # A second signal does not wait for open connections.
        self.force_exit = self.should_exit
        self.should_exit = True


def _settings() -> Settings:
    try:
        return settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        prefix = str(Settings.model_config["env_prefix"])
        variable = f"{prefix}{name}".upper() if name in Settings.model_fields else name
        raise LocalError(f"The variable {variable} is not valid: {first['msg']}.") from error


def _verify(options: Settings) -> None:
    try:
        verify(options.sandbox)
    except ConfinementError as error:
        raise LocalError(str(error)) from error


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket: on `port`, or on the first free one from 8289 (specification, 001).

    Raises:
        LocalError: if the port is taken or the address is not ours.
    """
    for candidate in [port] if port else range(_FIRST_PORT, _LAST_PORT):
        try:
            return _bind(host, candidate)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRINUSE:
                raise LocalError(
                    f"Port {port} is in use. Choose another with --port, or leave it out to have a free "
                    "one found."
                ) from error
            raise LocalError(
                # strerror, because a name that is not known has no errno of the system's.
                f"Cannot listen on {host}:{candidate}: {error.strerror}."
            ) from error
    raise LocalError(f"No port from {_FIRST_PORT} on is free.")


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


def _for_url(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
