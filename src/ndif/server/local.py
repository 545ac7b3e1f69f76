"""`ndif local start`: one model served in a terminal, on a free port, to one trusted user."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile

import uvloop
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ndif.config.groups import FolderSettings, GatewaySettings
from ndif.config.reference import read
from ndif.config.units import format_duration
from ndif.gateway.connection_limit import raise_descriptor_limit
from ndif.host.model_actor import LocalModelActor
from ndif.net import Http, StartError, for_url, listen, reachable_as
from ndif.sandbox.confinement.confinement import ConfinementError, verify
from ndif.schema.deployment import DeploymentConfig, read_task
from ndif.server.embedded import Owner, Server
from ndif.server.heap import return_free_memory
from ndif.stores.broker import BrokerError
from ndif.stores.objects.files import signing_key
from ndif.telemetry import logs

_GENERATION = "0.8"
"""nnsight generation whose model process starts with the server; others start with their first client."""
_PROGRESS_S = 0.1
_TOKEN_DIGITS = 32
_FOR_OTHERS = "   # only as another user of this machine, or from a container or another machine"


@dataclass(frozen=True)
class Local:
    """One invocation of `ndif local start`."""

    checkpoint: str
    name: str | None
    host: str
    port: int | None
    dtype: str
    device: str | None
    revision: str | None
    task: str | None
    attn_implementation: str | None
    threads: int
    replicas: int
    results: Path | None
    share_weights: bool
    sandbox: bool
    no_token: bool
    execution_timeout_s: float | None
    verbose: bool

    def run(self) -> None:
        """Serve until interrupted."""
        console = Console(stderr=True)
        options = read()
        handlers = [logs.for_console(console)] if options.log_format == "pretty" else None
        # A local server logs less than others, unless the options ask for more.
        level = logging.INFO if self.verbose else logging.WARNING
        logs.configure("server", options, handlers, None if options.log_level == "debug" else level)
        config = self.deployment()
        # Its users have no keys, so that no runner can be kept for a key.
        options = options.model_copy(update={"runner_scope": "request"})
        if options.allow_pickled_weights is None:
            options = options.model_copy(update={"allow_pickled_weights": True})
        if self.sandbox:
            try:
                verify(options.sandbox)
            except ConfinementError as error:
                raise StartError(str(error)) from error
        with listen(self.host, self.port) as listening, _noted_interrupts() as interrupts:
            results = self._results_folder(options, listening)
            if warning := self._warning(options):
                console.print(f"[bold yellow]Warning:[/] {escape(warning)}", soft_wrap=True)
            secret = signing_key(results)
            token = None if self.no_token else _token(secret)
            try:
                server = Server(
                    options,
                    [config],
                    results,
                    Owner(not self.sandbox, token, self.share_weights),
                    host=self.host,
                    secret=secret,
                )
            except BrokerError as error:
                raise StartError(
                    f"Jobs cannot be kept: {error}. Choose another --results-dir."
                ) from error
            try:
                return_free_memory()
                raise_descriptor_limit()
                uvloop.run(self._serve(server, listening, console, token, interrupts))
            finally:
                if self.results is None and not server.is_polled:
                    rmtree(results, ignore_errors=True)

    def _warning(self, options: GatewaySettings) -> str | None:
        """Return a warning that other people can run code here; None if only the owner can."""
        reachable = reachable_as(self.host, options.public_url)
        predicate = "may run code here, confined" if self.sandbox else "runs code here as you"
        if self.no_token:
            subject = (
                f"Everybody who reaches {reachable}" if reachable else "Every user of this machine"
            )
            return f"{subject} {predicate}: --no-token asks nobody for the token."
        if reachable:
            return f"{reachable} is reachable from other machines. Everybody who has the token {predicate}."
        return None

    def _results_folder(self, options: FolderSettings, listening: socket.socket) -> Path:
        """Return --results-dir, else a folder of the port, because polling clients use the same port."""
        port = listening.getsockname()[1]
        folder = self.results or options.root / "local" / str(port)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise StartError(
                f"Results cannot be kept in {folder} ({error.strerror}). Choose another --results-dir."
            ) from error
        return folder

    def deployment(self) -> DeploymentConfig:
        """Return the deployment that the options describe; raise a `StartError` if they contradict."""
        folder = Path(self.checkpoint).expanduser()
        is_folder = folder.is_dir()
        if is_folder and not (folder / "config.json").is_file():
            raise StartError(f"{folder} holds no config.json: it is not a checkpoint's folder.")
        if not is_folder and self.checkpoint.startswith((".", "/", "~")):
            raise StartError(f"There is no folder {folder}.")
        if is_folder and not self.name:
            raise StartError(
                f"{folder} is a folder, and clients ask for a model by name: add --name ORG/NAME."
            )
        if not is_folder and self.name and self.name != self.checkpoint:
            raise StartError("--name is for a folder; clients ask for a repository by its own id.")
        return DeploymentConfig(
            repo_id=self.name or self.checkpoint,
            checkpoint=str(folder.resolve()) if is_folder else self.checkpoint,
            revision=self.revision,
            task=self.task or (read_task(folder / "config.json") if is_folder else None),
            dtype=self.dtype,
            device=self.device,
            attn_implementation=self.attn_implementation,
            threads=self.threads,
            replicas=self.replicas,
            dedicated=True,
            execution_timeout_s=self.execution_timeout_s,
        )

    async def _serve(
        self,
        server: Server,
        listening: socket.socket,
        console: Console,
        token: str | None,
        interrupts: list[int],
    ) -> None:
        port = listening.getsockname()[1]
        http = Http(server.uvicorn_config(listening), farewell=server.farewell)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, http.stop)
        if interrupts:
            http.stop()
        serving = asyncio.create_task(http.serve(sockets=[listening]))
        loading = asyncio.create_task(self._load(server, listening, console, token))
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
            left = server.unfinished
            console.print("Stopped." if not left else f"Stopped. {_will_run(left, port)}")

    async def _load(
        self, server: Server, listening: socket.socket, console: Console, token: str | None
    ) -> None:
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
            replicas = await server.coordinator.bring_up(_GENERATION)
            for replica in replicas:
                up = asyncio.create_task(replica.up())
                while not up.done():
                    await asyncio.wait({up}, timeout=_PROGRESS_S)
                    if replica.progress is not None:
                        completed, total = replica.progress
                        bar.update(task, completed=completed, total=total)
                await up
        actor = replicas[0].actor
        assert isinstance(actor, LocalModelActor)  # noqa: S101 - this machine has no other
        model, repo_id = actor.model, replicas[0].model.config.repo_id
        assert model is not None  # noqa: S101 - it is loaded
        console.print(
            f"Loaded [bold]{repo_id}[/]: {model.parameters / 1e6:,.0f} M "
            f"parameters, {model.dtype} on {model.device}, "
            f"weights in {format_duration(actor.process.load_s)}, "
            f"ready {format_duration(time.time() - actor.process.loaded_at)} later"
            + (f", {self.replicas} times" if self.replicas > 1 else ""),
            soft_wrap=True,
        )
        url = f"http://{for_url(self.host)}:{listening.getsockname()[1]}"
        console.print(f"\nServing at [bold]{url}[/]. In your client:\n")
        console.print(
            f"    export NDIF_HOST={url}\n"
            + (f"    export NDIF_API_KEY={token}{_FOR_OTHERS}\n" if token else "")
            + f"    export HF_ENDPOINT={url}/hub   # only where huggingface.co cannot be reached\n\n"
            f'    model = TransformersModel("{repo_id}")\n'
            '    with model.trace("The Eiffel Tower is in", remote=True):\n'
            "        logits = model.output.logits.save()\n",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        console.print("Ctrl-C stops it.")


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Note each Ctrl-C until the loop handles it: a finalizer would swallow its exception."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _token(secret: str) -> str:
    """Return the token of a server, which stays the same while its folder of results is kept."""
    return hmac.new(secret.encode(), b"token", hashlib.sha256).hexdigest()[:_TOKEN_DIGITS]


def _will_run(polled: int, port: int) -> str:
    jobs = "1 polled job waits" if polled == 1 else f"{polled} polled jobs wait"
    return f"{jobs}, to run once port {port} is served again."
