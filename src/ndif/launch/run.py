"""One run of `ndif start`: its services, then what it serves, until it is told to stop."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import uvloop

from ndif import __version__
from ndif.config.reference import changed
from ndif.config.settings import Settings
from ndif.launch.run_folder import ActiveRunFolder, NodeType, RunRecord
from ndif.launch.services import Role
from ndif.launch.services.plan import addresses
from ndif.launch.services.service import Service, ServiceError
from ndif.net import STOP_SIGNALS, StartError
from ndif.server.process_config import LOG_FORMAT, configure_logging
from ndif.server.supervised import Supervisor

_SERVER_START_TIMEOUT_S = 60

_logger = logging.getLogger(__name__)


class Run(abc.ABC):
    """One process with a run folder of its own, and the services that stop with it.

    It owns the order: the run folder is published, services start one after the other, `_serve` serves, and
    services stop in reverse. Subclasses say what is served.
    """

    def __init__(
        self,
        options: Settings,
        run_folder: ActiveRunFolder,
        log: Path,
        services: Sequence[Service],
    ) -> None:
        self.options = options
        self.run_folder = run_folder
        self.log = log
        self.services = services
        self.was_ready = False
        """True once the run has served."""

    @property
    def start_timeout_s(self) -> float:
        """Return the seconds that the start may take."""
        return _SERVER_START_TIMEOUT_S + sum(service.start_timeout_s for service in self.services)

    @abc.abstractmethod
    def record(self) -> RunRecord:
        """Return what other commands read about this run."""

    @abc.abstractmethod
    def answers(self) -> bool:
        """Return True if the run serves, as seen from another process."""

    def close_inherited(self) -> None:  # noqa: B027 - not every run holds descriptors
        """Close the descriptors that a forked child now owns."""

    @abc.abstractmethod
    async def _serve(
        self, supervisor: Supervisor, on_ready: Callable[[], None], stopping: asyncio.Event
    ) -> None:
        """Serve until `stopping` is set, and call `on_ready` once it does."""

    def serve(
        self, handlers: Iterable[logging.Handler], on_ready: Callable[[RunRecord], None]
    ) -> None:
        """Serve until told to stop.

        Args:
            handlers: Handlers that receive the log beside its file.
            on_ready: Called with the run's record once it serves.

        Raises:
            StartError: If the run does not come up.
        """
        log = logging.FileHandler(self.log)
        log.setFormatter(logging.Formatter(LOG_FORMAT))
        configure_logging([log, *handlers])
        record = self.record()
        self.run_folder.publish(record)

        def ready() -> None:
            self.was_ready = True
            _logger.info("Serving at %s", record.url)
            on_ready(record)

        try:
            uvloop.run(self._run(ready))
        except Exception as error:
            if self.was_ready:
                raise
            # For the log, and for a terminal with --verbose.
            _logger.info("The server did not come up", exc_info=True)
            if isinstance(error, ServiceError):
                raise StartError(str(error)) from error
            raise StartError(f"The server did not come up: {error}.") from error
        if not self.was_ready:
            raise StartError("The server did not come up.")
        _logger.info("Stopped")

    def close(self) -> None:
        """End the run folder; remove it if the run never served."""
        if self.was_ready:
            self.run_folder.end()
        else:
            self.run_folder.discard()

    async def _run(self, on_ready: Callable[[], None]) -> None:
        stopping = asyncio.Event()
        _stop_on_signals(stopping)
        supervisor = Supervisor(stopping)
        try:
            for service in self.services:
                await service.start(supervisor, self.run_folder)
            if not stopping.is_set():
                await self._serve(supervisor, on_ready, stopping)
        finally:
            # The HTTP server had its own handlers. A further signal does not interrupt the stop.
            _stop_on_signals(stopping)
            await supervisor.stop()

    def _record(
        self, url: str, host: str, port: int, arguments: list[str], node_type: NodeType = "head"
    ) -> RunRecord:
        ours = {service.name for service in self.services}
        return RunRecord.of_this_process(
            self.run_folder.id,
            url=url,
            host=host,
            port=port,
            version=__version__,
            arguments=arguments,
            settings=changed(self.options),
            node_type=node_type,
            services={
                name: {"address": address, "ours": name in ours}
                for name, address in addresses(self.options).items()
            },
        )


class ServicesRun(Run):
    """Services without a server: one that was named, or a further node of a Ray cluster."""

    def __init__(
        self,
        options: Settings,
        role: Role,
        run_folder: ActiveRunFolder,
        services: Sequence[Service],
    ) -> None:
        super().__init__(options, run_folder, run_folder.log(services[0].name), services)
        self._role = role
        self._node_type: NodeType = "worker" if role == "worker" else "head"

    def answers(self) -> bool:
        """See `Run.answers`."""
        return all(service.answers(self.run_folder) for service in self.services)

    async def _serve(
        self, supervisor: Supervisor, on_ready: Callable[[], None], stopping: asyncio.Event
    ) -> None:
        on_ready()
        await supervisor.wait()

    def record(self) -> RunRecord:
        """See `Run.record`."""
        service = self.services[0]
        argument = "--worker" if self._role == "worker" else self._role
        return self._record(
            service.address, service.host, service.port, [argument], node_type=self._node_type
        )


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopping.set)
