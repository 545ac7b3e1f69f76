"""Processes that have imported what a program needs, and fork it for each call.

Usage: python -m tests.fork_server FD PROGRAM MODULE…: import the modules, then fork PROGRAM, a
`module:function`, for each order on FD. An import of torch takes two seconds of a core.
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
from pathlib import Path
from typing import TextIO

from tests.templates import hub_variables

_ROOT = Path(__file__).parents[1]
_MAX_BYTES = 1 << 20


class ForkedProcess:
    """A forked program: the pipes and the methods of a `subprocess.Popen` that tests use."""

    def __init__(
        self, pidfd: int, stdin: TextIO, stdout: TextIO, stderr: TextIO, status: TextIO
    ) -> None:
        self._pidfd = pidfd
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._status = status

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Return once it has ended."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)

    def communicate(self, timeout: float | None = None) -> tuple[int, str, str]:
        """Return its exit code, and what it printed, once it has ended; end it after `timeout` seconds."""
        patience = threading.Timer(timeout or threading.TIMEOUT_MAX, self.kill)
        patience.daemon = True
        patience.start()
        self.stdin.close()
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reading.start()
        output = self.stdout.read()
        reading.join()
        self.wait()
        patience.cancel()
        # What the program has started may hold the other end.
        ready = select.select([self._status], [], [], 0)[0]
        status = os.read(self._status.fileno(), 16).decode() if ready else ""
        for stream in (self.stdout, self.stderr, self._status):
            stream.close()
        os.close(self._pidfd)
        return int(status or -signal.SIGKILL), output, errors[0]


class ForkServer:
    """The fork server of one program in this process. It ends with this process."""

    def __init__(self, program: str, imported: Sequence[str], folder: Path | None = None) -> None:
        """`folder`: goes in front on the program's path."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        path = [str(folder)] if folder else []
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), program, *imported],
                pass_fds=[theirs.fileno()],
                cwd=_ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(
                        [*path, *filter(None, [os.environ.get("PYTHONPATH")])]
                    ),
                },
            )

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
    ) -> ForkedProcess:
        """Fork the program with these arguments in this environment and folder."""
        (stdin, write), (read, stdout), (errors, stderr), (state, status) = [
            os.pipe() for _ in range(4)
        ]
        theirs = [stdin, stdout, stderr, status]
        order = {
            "arguments": [str(each) for each in arguments],
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
        }
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(order).encode()], theirs)
            _, (pidfd,), _, _ = socket.recv_fds(self._connection, _MAX_BYTES, 1)
        for fd in theirs:
            os.close(fd)
        files = (os.fdopen(write, "w"), os.fdopen(read), os.fdopen(errors), os.fdopen(state))
        return ForkedProcess(pidfd, *files)


def main() -> None:
    """Import, and fork the program for each order, until nobody holds the other end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    program, *imported = sys.argv[2:]
    sys.path.pop(0)  # the folder of the repository, which no program of a user has
    for name in imported:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 4)
        if not order:
            return
        begin, may_begin = os.pipe()
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(may_begin)
            os.read(begin, 1)
            os.close(begin)
            become(program, **json.loads(order), fds=fds)
        pidfd = os.pidfd_open(pid)  # before the program may end
        socket.send_fds(connection, [b"forked"], [pidfd])
        for fd in (begin, may_begin, pidfd, *fds):
            os.close(fd)


def become(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    fds: Sequence[int],
) -> None:
    """Run a program in this process, as if it had been started with these; and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, status = fds
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
        os.close(fd)
    os.set_inheritable(status, False)
    os.environ.clear()
    os.environ.update(environment)
    hub_variables.read_again()
    os.chdir(folder)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    module, _, function = program.partition(":")
    sys.argv = [module.partition(".")[0], *arguments]
    sys.modules["__main__"].__package__ = None  # else click calls the program `python -m …`
    try:
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(status, str(code).encode())
    os._exit(code)


if __name__ == "__main__":
    main()
