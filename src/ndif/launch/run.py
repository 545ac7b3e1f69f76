"""What `ndif start` starts, from what it needs until it is told to stop: services of ours, and a server."""

from __future__ import annotations

import abc
import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import uvloop

from ndif.config import Settings
from ndif.gateway.serving import StartError
from ndif.services.chain import Chain
from ndif.services.needed import addresses
from ndif.services.service import Service, ServiceError
from ndif.session.folder import Own
from ndif.session.record import Record

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TALKATIVE = ("httpx", "httpcore")
_COMES_UP_WITHIN_S = 60

_logger = logging.getLogger(__name__)


class Run(abc.ABC):
    """One process with a session of its own, and the services that end with it."""

    def __init__(
        self, options: Settings, session: Own, log: Path, services: Sequence[Service]
    ) -> None:
        self.options = options
        self.session = session
        self.log = log
        self.services = services
        self.is_up = False
        """Whether it has ever answered."""

    @property
    def comes_up_within_s(self) -> float:
        """How long that may take."""
        return _COMES_UP_WITHIN_S + sum(service.comes_up_within_s for service in self.services)

    @abc.abstractmethod
    def record(self) -> Record:
        """What others find of it."""

    @abc.abstractmethod
    def answers(self) -> bool:
        """Whether it does, as another process sees it."""

    def release(self) -> None:  # noqa: B027 - not everybody holds anything
        """Let go of what the process that runs it has inherited."""

    @abc.abstractmethod
    async def _serve(self, up: Callable[[], None], stopping: asyncio.Event) -> None:
        """Serve until told to stop."""

    def serve(self, handlers: Iterable[logging.Handler], up: Callable[[Record], None]) -> None:
        """Serve until told to stop; `up` is called once it answers, and `handlers` get the log as well.

        Raises:
            StartError: if it does not come up.
        """
        log = logging.FileHandler(self.log)
        log.setFormatter(logging.Formatter(_LOG_FORMAT))
        logging.basicConfig(level=logging.INFO, handlers=[log, *handlers], force=True)
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        record = self.record()
        self.session.publish(record)

        def is_up() -> None:
            self.is_up = True
            _logger.info("Serving at %s", record.url)
            up(record)

        try:
            uvloop.run(self._run(is_up))
        except Exception as error:
            if self.is_up:
                raise
            # For the log, and for a terminal that asked for it.
            _logger.info("The server did not come up", exc_info=True)
            if isinstance(error, ServiceError):
                raise StartError(str(error)) from error
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

    async def _run(self, up: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()
        for number in SIGNALS:
            loop.add_signal_handler(number, stopping.set)
        chain = Chain(self.services, self.session)
        try:
            await chain.start(stopping)
            if not stopping.is_set():
                await self._serve(up, stopping)
        finally:
            # What served had them for itself; that services end is not to be interrupted.
            for number in SIGNALS:
                loop.add_signal_handler(number, stopping.set)
            await chain.end()

    def places(self) -> dict[str, dict[str, object]]:
        """Where services are, and whose: for a record."""
        ours = {service.name for service in self.services}
        return {
            name: {"address": address, "ours": name in ours}
            for name, address in addresses(self.options).items()
        }
