"""The run of a server: in this one process, or, with a broker, in several that this one supervises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ndif.config.settings import Settings
from ndif.launch.preflight import Prepared, ServerOptions
from ndif.launch.run import Run
from ndif.launch.run_folder import ActiveRunFolder, RunRecord
from ndif.net import Http, answers, for_url, is_loopback
from ndif.server.embedded import Server
from ndif.server.process_config import ProcessConfig
from ndif.server.supervised import Supervisor


class ServerRun(Run):
    """One server: the gateway, the dispatcher and what they need, in one process or several."""

    def __init__(
        self,
        options: Settings,
        server: ServerOptions,
        prepared: Prepared,
        run_folder: ActiveRunFolder,
    ) -> None:
        super().__init__(options, run_folder, run_folder.log(), prepared.services)
        self.server = server
        self._listening = prepared.listening
        self._port: int = prepared.listening.getsockname()[1]
        self._deployments = prepared.deployments

    def answers(self) -> bool:
        """See `Run.answers`."""
        return answers(self.server.host, self._port)

    def close_inherited(self) -> None:
        """See `Run.close_inherited`."""
        self._listening.close()

    async def _serve(
        self, supervisor: Supervisor, on_ready: Callable[[], None], stopping: asyncio.Event
    ) -> None:
        if self.options.broker_url:
            await self._supervise(supervisor, on_ready, stopping)
        else:
            await self._serve_alone(on_ready)

    async def _supervise(
        self, supervisor: Supervisor, on_ready: Callable[[], None], stopping: asyncio.Event
    ) -> None:
        """Serve in gateways and a dispatcher of their own; this process only supervises them."""
        run_folder = self.run_folder
        config = ProcessConfig(
            listening=self._listening.fileno(),
            results=run_folder.results,
            secret=run_folder.signing_key(),
            token=run_folder.token() or "",
            loopback=is_loopback(self.server.host),
            deployments=self._deployments,
        )
        # Removed with the services' data when the run ends, also after a crash.
        file = run_folder.service_data("processes") / "config.json"
        config.write(file)
        processes = config.processes(
            file, self.options.api_workers, run_folder.log(), run_folder.log("dispatcher")
        )
        await supervisor.start(processes, self.answers)
        if not stopping.is_set():
            on_ready()
            await supervisor.wait()

    async def _serve_alone(self, on_ready: Callable[[], None]) -> None:
        http: Http
        server = Server(
            self.options,
            self._deployments,
            self.run_folder.results,
            secret=self.run_folder.signing_key(),
            token=self.run_folder.token() or "",
            loopback=is_loopback(self.server.host),
            places=True,
            stop=lambda: http.stop(),
        )
        http = Http(server.uvicorn_config(self._listening), on_ready, server.farewell)
        await http.serve(sockets=[self._listening])

    def record(self) -> RunRecord:
        """See `Run.record`."""
        server = self.server
        file = server.deployment_file
        return self._record(
            f"http://{for_url(server.host)}:{self._port}",
            server.host,
            self._port,
            [
                *([server.role] if server.role != "all" else []),
                *("--host", server.host, "--port", str(self._port)),
                *(["--deployment-config", str(file.absolute())] if file else []),
                *map(_absolute, server.checkpoints),
            ],
        )


def _absolute(checkpoint: str) -> str:
    """Return a checkpoint argument that means the same in every working directory."""
    name, equals, place = checkpoint.partition("=")
    if not equals or "{" in name:
        return checkpoint
    return f"{name}={Path(place).expanduser().resolve()}"
