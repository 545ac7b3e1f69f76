"""A store of metrics or logs with configurable behaviour, in a thread."""

from __future__ import annotations

import contextlib
import gzip
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.services.process import HOST
from tests.waiting import time_passes

HANGS, SPEAKS_NO_HTTP, HANGS_UP = 0, -1, -2
"""Behaviours of a store other than answers with a status."""


@dataclass
class Batch:
    """One batch that a store accepted."""

    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Store:
    """A store that listens at its port within its context."""

    port: int = 0
    behaviour: int = 204
    delay_s: float = 0.0
    tls: ssl.SSLContext | None = None
    asked: int = 0
    taken: list[Batch] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    """An event that releases a hanging store."""

    @property
    def url(self) -> str:
        """The address of the store."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Store:
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with contextlib.suppress(ConnectionError):
                    store._exchange(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, self.port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _exchange(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        behaviour = self.behaviour
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        if behaviour == HANGS:
            self.released.wait()
        time_passes(self.delay_s)
        if behaviour == SPEAKS_NO_HTTP:
            handler.wfile.write(b"220 smtp.example.org\r\n\r\n")
        if behaviour <= 0:
            handler.close_connection = True
            return
        if behaviour == 204:
            headers = {name.lower(): value for name, value in handler.headers.items()}
            self.taken.append(Batch(handler.path, headers, gzip.decompress(body)))
        handler.send_response(behaviour)
        answer = b"" if behaviour == 204 else b'{"error": "no"}'
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)
