"""A whole gateway behind a real socket, in this process. It accepts jobs, but they are not run."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import websocket
import zstandard

from ndif.config.settings import Settings
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request
from ndif.server.embedded import Operator, Owner, Server
from tests.waiting import PATIENCE_S, until

NAME = "test-org/model"
MODEL_KEY = json.dumps({"repo_id": NAME, "revision": None, "task": "text-generation"})
NEW = f"nnsight.modeling.transformers.TransformersModel:{MODEL_KEY}"
OLD = f"nnsight.modeling.language.LanguageModel:{json.dumps({'repo_id': NAME, 'revision': None})}"
PAYLOAD = zstandard.compress(b"opaque")
SOMEBODY = 65533
"""A user of this machine other than the server's."""
_LIBC = ctypes.CDLL(None)

get, post = (
    # No certificate is needed, and each client would read all of them.
    partial(httpx.request, method, verify=False)
    for method in ("GET", "POST")
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@dataclass(frozen=True)
class Gateway:
    """A gateway that serves at a port of this machine."""

    server: Server
    port: int

    @property
    def url(self) -> str:
        """Return the loopback address."""
        return f"http://127.0.0.1:{self.port}"

    def submit(self, url: str = "", *, session: str = "", **headers: str) -> httpx.Response:
        """Send a job as nnsight 0.8 does."""
        return post(
            f"{url or self.url}/request",
            data={"data": json.dumps({"model_key": NEW, "session_id": session})},
            files={"blob": PAYLOAD},
            headers={"nnsight-version": "0.8.1", **headers},
        )

    def submit_old(self, *, session: str = "", **headers: str) -> httpx.Response:
        """Send a job as nnsight 0.7 does."""
        required = {
            "nnsight-version": "0.7.0",
            "nnsight-model-key": OLD,
            "ndif-session_id": session,
        }
        return post(f"{self.url}/request", content=PAYLOAD, headers={**required, **headers})

    def subscribe(self, headers: Mapping[str, str]) -> int:
        """Open a live channel like nnsight 0.8, and close it; return the status of a refusal, else 101."""
        address = f"ws://127.0.0.1:{self.port}/subscribe"
        with contextlib.closing(
            websocket.create_connection(address, header=dict(headers), timeout=PATIENCE_S)
        ) as channel:
            if "status" not in json.loads(channel.recv()):
                return 101
            _, closed = channel.recv_data()
        return int.from_bytes(closed[:2], "big") - 4000

    def accepted(self, answer: httpx.Response) -> Request:
        """Return the accepted request of an answer."""
        assert answer.status_code == 200, answer.text
        unfinished = self.server.stores.broker.unfinished
        return next(request for request in unfinished if request.id == answer.json()["id"])


@contextlib.contextmanager
def gateway(
    folder: Path,
    runtimes: Path,
    *,
    host: str = "127.0.0.1",
    whose: Owner | Operator = Owner(trusted=False),  # noqa: B008 - it is immutable
    **settings: Any,
) -> Iterator[Gateway]:
    """Yield a gateway that listens on `host`, for one user or many, with these settings."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, dualstack_ipv6=":" in host)
    model = DeploymentConfig(NAME, NAME, task="text-generation", dedicated=True)
    has_keys = bool({"api_keys", "database_url"} & set(settings))
    settings = {"dev_mode": not has_keys, **settings}
    server = Server(Settings(runtimes_dir=runtimes, **settings), [model], folder, whose, host=host)
    config = server.uvicorn_config(listening)
    config.lifespan = "off"
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, args=([listening],), daemon=True)
    thread.start()
    until(lambda: http.started)
    try:
        yield Gateway(server, listening.getsockname()[1])
    finally:
        http.should_exit = http.force_exit = True
        thread.join(PATIENCE_S)
        listening.close()


@contextlib.contextmanager
def user(uid: int) -> Iterator[None]:
    """Open sockets as another user of this machine, in this thread only; the server has other threads."""
    _LIBC.setfsuid(uid)
    try:
        yield
    finally:
        _LIBC.setfsuid(0)


def own_address() -> str | None:
    """Return a non-loopback address of this machine; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return address
