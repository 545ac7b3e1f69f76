"""Listening sockets, addresses and graceful shutdown of an HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import quote, urlsplit

import uvicorn

from ndif.errors import NdifError
from ndif.hostname import is_loopback, is_wildcard
from ndif.tasks import end

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals on which every process of the server shuts down gracefully."""

_FIRST_PORT = 8289
_LAST_PORT = 65535
_FAREWELL_S = 0.2
"""Seconds for the last messages to reach their clients."""
_PORT_ADVICE = "Choose another port with --port, or omit --port to use the first free one."


class StartError(NdifError):
    """The server cannot start; the message says what to do."""


class Http(uvicorn.Server):
    """A uvicorn server that stops on the first signal, and does not raise it again for its caller."""

    def __init__(
        self,
        config: uvicorn.Config,
        up: Callable[[], None] = lambda: None,
        farewell: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Create a server that calls `up` once it answers, and `farewell` before it closes connections."""
        super().__init__(config)
        self._up = up
        self._farewell = farewell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`. Calls `up` afterwards."""
        await super().startup(sockets)
        if self.started:
            self._up()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`. Awaits `farewell` first, unless a second signal forces the end."""
        if self._farewell is not None:
            leaving = asyncio.create_task(self._say_farewell(self._farewell), name="farewell")
            while not leaving.done() and not self.force_exit:
                await asyncio.wait([leaving], timeout=_FAREWELL_S)
            await end([leaving])
        await super().shutdown(sockets)

    async def _say_farewell(self, farewell: Callable[[], Awaitable[None]]) -> None:
        try:
            await farewell()
        except Exception:
            logger.exception("clients could not be notified that the server stops")
        await asyncio.sleep(_FAREWELL_S)

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Stop once the requests in progress have ended; on a second call, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def listen(host: str, port: int | None, advice: str = _PORT_ADVICE) -> socket.socket:
    """Return a socket that listens on `port`, or on the first free port from 8289.

    Raise a `StartError` if no port is free; if `port` is taken, the message ends with `advice`.
    """
    for candidate in [port] if port else range(_FIRST_PORT, _LAST_PORT + 1):
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, candidate))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRINUSE:
                raise StartError(
                    # An unknown host name has a strerror, but no errno of the operating system.
                    f"Cannot listen on {host}:{candidate}: {error.strerror}."
                ) from error
            if port:
                raise StartError(f"Port {port} is in use. {advice}") from error
        else:
            return listening
    raise StartError(f"No port from {_FIRST_PORT} on is free.")


def is_serving(host: str, port: int) -> bool:
    """Return True if `GET /ping` at the address answers 200, as a server of this program does."""
    import httpx

    try:
        url = f"{local_url(host, port)}/ping"
        response = httpx.get(url, timeout=1, trust_env=False, verify=False)  # noqa: S501 - no TLS
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK


def reachable_as(host: str, public_url: str) -> str | None:
    """Return the name by which other machines reach a server on `host`; None if they cannot."""
    return public_url or (None if is_loopback(host) else host)


def with_password(url: str, password: str | None) -> str:
    """Return `url` with the password, unless it has credentials already or names a Unix socket."""
    parts = urlsplit(url)
    if not password or parts.username or parts.password or parts.scheme == "unix":
        return url
    return parts._replace(netloc=f":{quote(password, safe='')}@{parts.netloc}").geturl()


def local_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches its own server that listens on `host`."""
    if is_wildcard(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://{for_url(host)}:{port}"


def for_url(host: str) -> str:
    """Return `host` for a URL: IPv6 in brackets, this machine's name for a wildcard address."""
    if is_wildcard(host):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
