"""The server of many models: in one process, or, with a broker, in many that this one looks after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ndif import __version__
from ndif.config import Settings
from ndif.gateway.origin import is_loopback
from ndif.gateway.serving import Http, answers, for_url
from ndif.launch.preflight import Ready, Wanted
from ndif.launch.run import Run
from ndif.server.embedded import Server
from ndif.server.part import Part
from ndif.server.supervisor import Module, Supervisor
from ndif.session.folder import Own
from ndif.session.record import Record, record_of
from ndif.variables import changed


class ServerRun(Run):
    """One server, with a session of its own."""

    def __init__(self, options: Settings, wanted: Wanted, ready: Ready, session: Own) -> None:
        super().__init__(options, session, session.log(), ready.services)
        self.wanted = wanted
        self._listening = ready.listening
        self._deployments = ready.deployments

    def answers(self) -> bool:
        """See `Run.answers`."""
        return answers(self.wanted.host, self.wanted.port)

    def release(self) -> None:
        """See `Run.release`."""
        self._listening.close()

    async def _serve(self, up: Callable[[], None], stopping: asyncio.Event) -> None:
        if self.options.broker_url:
            await self._supervise(up)
        else:
            await self._serve_alone(up)

    async def _supervise(self, up: Callable[[], None]) -> None:
        """Be many processes, and this one only looks after them."""
        session, listening = self.session, self._listening
        part = Part(
            listening.fileno(),
            session.results,
            session.signing(),
            session.token() or "",
            is_loopback(self.wanted.host),
            self._deployments,
        )
        gateways = [
            Module(f"gateway {number}", "ndif.server.worker", session.log(), gives_up=True)
            for number in range(self.options.api_workers)
        ]
        leader = Module("dispatcher", "ndif.server.lead", session.log("dispatcher"), gives_up=False)
        supervisor = Supervisor([leader, *gateways], part, session.folder)
        await supervisor.run(lambda: answers(self.wanted.host, listening.getsockname()[1]), up)

    async def _serve_alone(self, up: Callable[[], None]) -> None:
        http: Http
        server = Server.many(
            self.options,
            self._deployments,
            self.session.results,
            secret=self.session.signing(),
            token=self.session.token() or "",
            loopback=is_loopback(self.wanted.host),
            stop=lambda: http.stop(),
        )
        http = Http(server.http(self._listening), up, server.farewell)
        await http.serve(sockets=[self._listening])

    def record(self) -> Record:
        """See `Run.record`."""
        wanted = self.wanted
        port = self._listening.getsockname()[1]
        file = wanted.deployment_file
        return record_of(
            self.session.id,
            url=f"http://{for_url(wanted.host)}:{port}",
            host=wanted.host,
            port=port,
            version=__version__,
            arguments=[
                *([wanted.role] if wanted.role != "all" else []),
                *("--host", wanted.host, "--port", str(port)),
                *(["--deployment-config", str(file.absolute())] if file else []),
                *map(_whole, wanted.checkpoints),
            ],
            settings=changed(self.options),
            services=self.places(),
        )


def _whole(checkpoint: str) -> str:
    """An argument that means the same in another working folder."""
    name, equals, place = checkpoint.partition("=")
    if not equals or "{" in name:
        return checkpoint
    return f"{name}={Path(place).expanduser().resolve()}"
