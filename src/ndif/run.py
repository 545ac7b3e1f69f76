"""The server of many models, from what it needs until it is told to stop."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

import uvloop

from ndif import __version__
from ndif.config import Settings
from ndif.gateway.origin import is_loopback
from ndif.part import Part
from ndif.preflight import Ready, Wanted
from ndif.server import Server
from ndif.serving import Http, StartError, answers, for_url
from ndif.session import Own
from ndif.session_record import Record, record_of
from ndif.supervisor import Supervisor, Task
from ndif.variables import changed

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TALKATIVE = ("httpx", "httpcore")


_logger = logging.getLogger(__name__)


class Run:
    """One server in this process, with a session of its own."""

    def __init__(self, options: Settings, wanted: Wanted, ready: Ready, session: Own) -> None:
        self.options = options
        self.wanted = wanted
        self.listening = ready.listening
        self.session = session
        self.is_up = False
        """Whether it has ever answered."""
        self._deployments = ready.deployments

    def serve(self, handlers: Iterable[logging.Handler], up: Callable[[Record], None]) -> None:
        """Serve until told to stop; `up` is called once it answers, and `handlers` get the log as well.

        Raises:
            StartError: if it does not come up.
        """
        log = logging.FileHandler(self.session.log())
        log.setFormatter(logging.Formatter(_LOG_FORMAT))
        logging.basicConfig(level=logging.INFO, handlers=[log, *handlers], force=True)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        record = self._record()
        self.session.publish(record)

        def is_up() -> None:
            self.is_up = True
            _logger.info("Serving at %s", record.url)
            up(record)

        try:
            uvloop.run(self._serve(is_up))
        except Exception as error:
            if self.is_up:
                raise
            # For the log, and for a terminal that asked for it.
            _logger.info("The server did not come up", exc_info=True)
            raise StartError(f"The server did not come up: {error}.") from error
        if not self.is_up:
            raise StartError("The server did not come up.")
        _logger.info("Stopped")

    def leave(self) -> None:
        """End the session; of one that never was, leave nothing."""
        if self.is_up:
            self.session.end()
        else:
            self.session.discard()

    async def _serve(self, up: Callable[[], None]) -> None:
        if self.options.broker_url:
            await self._supervise(up)
        else:
            await self._serve_alone(up)

    async def _supervise(self, up: Callable[[], None]) -> None:
        """Be many processes, and this one only looks after them."""
        session, listening = self.session, self.listening
        part = Part(
            listening.fileno(),
            session.results,
            secrets.token_hex(32),
            session.token() or "",
            is_loopback(self.wanted.host),
            self._deployments,
        )
        gateways = [
            Task(f"gateway {number}", "ndif.worker", session.log(), gives_up=True)
            for number in range(self.options.api_workers)
        ]
        leader = Task("dispatcher", "ndif.lead", session.log("dispatcher"), gives_up=False)
        supervisor = Supervisor([leader, *gateways], part, session.folder)
        await supervisor.run(lambda: answers(self.wanted.host, listening.getsockname()[1]), up)

    async def _serve_alone(self, up: Callable[[], None]) -> None:
        http: Http
        server = Server.many(
            self.options,
            self._deployments,
            self.session.results,
            token=self.session.token() or "",
            loopback=is_loopback(self.wanted.host),
            stop=lambda: http.stop(),
        )
        http = Http(server.http(self.listening), up)
        await http.serve(sockets=[self.listening])

    def _record(self) -> Record:
        wanted = self.wanted
        port = self.listening.getsockname()[1]
        file = wanted.deployment_file
        return record_of(
            self.session.id,
            url=f"http://{for_url(wanted.host)}:{port}",
            host=wanted.host,
            port=port,
            version=__version__,
            arguments=[
                *("--host", wanted.host, "--port", str(port)),
                *(["--deployment-config", str(file.absolute())] if file else []),
                *map(_whole, wanted.checkpoints),
            ],
            settings=changed(self.options),
        )


def _whole(checkpoint: str) -> str:
    """An argument that means the same in another working folder."""
    name, equals, place = checkpoint.partition("=")
    if not equals or "{" in name:
        return checkpoint
    return f"{name}={Path(place).expanduser().resolve()}"
