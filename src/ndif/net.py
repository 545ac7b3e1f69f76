"""What every size of the server does to be reached: a socket, an address, an end at the first signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable

import uvicorn

from ndif.tasks import end

logger = logging.getLogger(__name__)

_FIRST_PORT = 8289
_LAST_PORT = 65535
_LAST_WORDS_S = 0.2
"""How long what was said last is on its way to clients."""
_OR_ANY = "Choose another with --port, or leave it out to have a free one found."


class StartError(Exception):
    """The server cannot start; the message says what to do."""


class Http(uvicorn.Server):
    """Ends on the first signal without passing it on: the rest of the shutdown is ours."""

    def __init__(
        self,
        config: uvicorn.Config,
        up: Callable[[], None] = lambda: None,
        farewell: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`up` is called once it answers; `farewell` before any client's connection is closed."""
        super().__init__(config)
        self._up = up
        self._farewell = farewell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`; what is to be done once it answers is done then."""
        await super().startup(sockets)
        if self.started:
            self._up()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`; before it, clients are told, unless whoever ends it is in a hurry."""
        if self._farewell is not None:
            told = asyncio.create_task(self._take_leave(self._farewell), name="farewell")
            while not told.done() and not self.force_exit:
                await asyncio.wait([told], timeout=_LAST_WORDS_S)
            await end([told])
        await super().shutdown(sockets)

    async def _take_leave(self, farewell: Callable[[], Awaitable[None]]) -> None:
        try:
            await farewell()
        except Exception:
            logger.exception("clients could not be told that the server stops")
        await asyncio.sleep(_LAST_WORDS_S)

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """See `uvicorn.Server`."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """End, once what is being answered has been; a second call does not wait for that."""
        self.force_exit = self.should_exit
        self.should_exit = True


def listen(host: str, port: int | None, advice: str = _OR_ANY) -> socket.socket:
    """A listening socket: on `port`, or on the first free one from 8289 (specification, 001).

    Raises:
        StartError: if the port is taken, which ends with `advice`, or the address is not ours.
    """
    for candidate in [port] if port else range(_FIRST_PORT, _LAST_PORT):
        try:
            return _bind(host, candidate)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRINUSE:
                raise StartError(f"Port {port} is in use. {advice}") from error
            raise StartError(
                # strerror, because a name that is not known has no errno of the system's.
                f"Cannot listen on {host}:{candidate}: {error.strerror}."
            ) from error
    raise StartError(f"No port from {_FIRST_PORT} on is free.")


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


def answers(host: str, port: int) -> bool:
    """Whether a server of ours answers there."""
    import httpx

    try:
        url = f"{local_url(host, port)}/ping"
        found = httpx.get(url, timeout=1, trust_env=False, verify=False)  # noqa: S501 - no TLS
    except httpx.HTTPError:
        return False
    return found.status_code == httpx.codes.OK


def is_everywhere(host: str) -> bool:
    """Whether a server that listens on `host` is reached by every address of its machine."""
    return host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


def local_url(host: str, port: int) -> str:
    """Where a server that listens on `host` is reached on its own machine."""
    if is_everywhere(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://{for_url(host)}:{port}"


def for_url(host: str) -> str:
    """A host as clients can name it in an address."""
    if is_everywhere(host):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
