"""A real HTTP server on loopback for the duration of a test."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping

import uvicorn
from starlette.types import ASGIApp

from tests.waiting import PATIENCE_S, until

_FORMS = ("NDIF_DEV_MODE", "NDIF_API_KEYS", "NDIF_DATABASE_URL", "POSTGRES_HOST")


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server that needs no keys, unless the environment configures keys."""
    is_configured = any(name in environment for name in _FORMS)
    return {**({} if is_configured else {"NDIF_DEV_MODE": "true"}), **environment}


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve `app` in a thread; yield its address."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        serving_on(uvicorn.Config(app, log_level="warning"), listening) as url,
    ):
        yield url


@contextlib.contextmanager
def serving_on(config: uvicorn.Config, listening: socket.socket) -> Iterator[str]:
    """Serve an application, without its lifespan, on a socket in a thread; yield its address."""
    config.lifespan = "off"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
