"""A real HTTP server on loopback for as long as a test needs one."""

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
    """The environment of a server whose users need no key, unless it says who has one."""
    is_said = any(name in environment for name in _FORMS)
    return {**({} if is_said else {"NDIF_DEV_MODE": "true"}), **environment}


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """The address of `app`, which a thread serves."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        serving_on(uvicorn.Config(app, log_level="warning"), listening) as url,
    ):
        yield url


@contextlib.contextmanager
def serving_on(config: uvicorn.Config, listening: socket.socket) -> Iterator[str]:
    """The address of an application, without its lifespan, which a thread serves on a socket."""
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
