"""A process that has imported torch, from which the clients of one test process are forked.

Usage: fork_server.py FD. Torch and its like are half of what a client imports, and read nothing of the
environment that differs between clients. What does (the Hub's library, transformers, nnsight), each
client imports itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TextIO

IMPORTED = ("torch", "torch.export", "torch._dynamo", "numpy", "sympy", "pydantic", "httpx", "rich")
_MAX_BYTES = 1 << 20


class ForkedClient:
    """A client's process: the pipes and the two methods of a `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> None:
        self._pidfd = os.pidfd_open(pid)
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Return once it has ended."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a client", timeout or 0)


class ForkServer:
    """The fork server of this process. It ends with this process."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            subprocess.Popen(
                [sys.executable, Path(__file__), str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedClient:
        """Fork a client, which runs `worker.main` with these arguments in this environment."""
        (stdin, write), (read, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
        order = json.dumps({"arguments": arguments, "environment": dict(environment)}).encode()
        with self._lock:
            socket.send_fds(self._connection, [order], [stdin, stdout, stderr])
            pid = int(self._connection.recv(_MAX_BYTES))
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        return ForkedClient(pid, open(write, "w"), open(read), open(errors))  # noqa: PTH123


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this process, started when it is first asked for."""
    return ForkServer()


def main() -> None:
    """Import, and fork a client for each order, until nobody holds the other end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            become(**json.loads(order), fds=fds)
        connection.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def become(arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> None:
    """Run a client in this process, as if it had been started with these; and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["worker.py", *arguments]
    try:
        importlib.import_module("worker").main()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
