"""Webhooks of an operator: real HTTP servers on loopback with configurable answers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANGS = 0


@dataclass
class Receiver:
    """A web server that takes messages."""

    port: int = 0
    status: int = 200
    later_status: int | None = None
    """The status of every answer after the first; None means `status`."""
    headers: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    taken: list[dict[str, Any]] = field(default_factory=list)
    """Bodies that it answered with success."""
    arrived: list[float] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """The address, with a secret in its path and query."""
        return f"http://127.0.0.1:{self.port}/services/a-secret?token=another-secret"


@contextlib.contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    """Serve until the end of the block."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            # Read before the call is counted: a test may change both once it sees the count.
            status, headers = receiver.status, dict(receiver.headers)
            if receiver.asked and receiver.later_status is not None:
                status = receiver.later_status
            receiver.asked += 1
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/json"
            assert self.path == "/services/a-secret?token=another-secret"
            if status == HANGS:
                receiver.released.wait()
                self.close_connection = True
                return
            if status < 300:
                receiver.taken.append(body)
                receiver.arrived.append(time.monotonic())
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
