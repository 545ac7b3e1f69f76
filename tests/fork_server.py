"""Fork servers: processes that have imported a program's modules, and fork the program for each call.

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
from typing import Any, TextIO

from tests.templates import hub_variables, shown

_ROOT = Path(__file__).parents[1]
_MAX_BYTES = 1 << 20
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_")
"""Prefixes of variables that a process reads as it starts."""
_LIBRARIES = {name: os.environ[name] for name in os.environ if name.startswith("LD_")}


class ForkedProcess:
    """A forked program: the part of a `subprocess.Popen` that tests use."""

    def __init__(
        self,
        args: Sequence[str],
        pid: int,
        pidfd: int,
        status: int,
        streams: tuple[TextIO, TextIO, TextIO],
    ) -> None:
        self.args = args
        self.pid = pid
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._status = status
        """A pipe for the exit code. If it closes without one, the fork server and its forks have ended."""

    def send_signal(self, number: int) -> None:
        """Send the program a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill the program."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the program's exit code, or minus a signal's number; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(os.read(self._status, 16) or -signal.SIGKILL)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the program's exit code once it has ended."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[int, str, str]:
        """Return exit code, output and errors at the program's end; kill it after `timeout` seconds."""
        patience = threading.Timer(timeout or threading.TIMEOUT_MAX, self.kill)
        patience.daemon = True
        patience.start()
        self.stdin.close()
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reading.start()
        output = self.stdout.read()
        reading.join()
        code = self.wait()
        patience.cancel()
        self.stdout.close()
        self.stderr.close()
        return code, output, errors[0]

    def __del__(self) -> None:
        os.close(self._pidfd)
        os.close(self._status)


class ForkServer:
    """This process's fork server of one program. The fork server ends with this process."""

    def __init__(
        self,
        program: str,
        imported: Sequence[str],
        folder: Path | None = None,
        command: Sequence[str] = (),
    ) -> None:
        """Start the fork server.

        `folder`: comes first on the program's path. `command`: the command line that calls the program.
        """
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._command = list(command)
        # Not the library path that a single test has set.
        kept = {name: os.environ[name] for name in os.environ if not name.startswith("LD_")}
        self._environment = kept | _LIBRARIES
        path = [str(folder), *_path(kept)] if folder else _path(kept)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), program, *imported],
                pass_fds=[theirs.fileno()],
                cwd=_ROOT,
                env=shown.with_room({**self._environment, "PYTHONPATH": os.pathsep.join(path)}),
            )

    def takes(self, environment: Mapping[str, str]) -> bool:
        """Return True if a fork can have these variables: a process reads some only at its start."""
        read = (name for name in environment if name.startswith(_READ_AT_START))
        return all(environment[name] == self._environment.get(name) for name in read)

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        is_short: bool = True,
        one_stream: bool = False,
    ) -> ForkedProcess:
        """Fork the program with these arguments in this environment and this process's folder.

        `is_short`: skip Python's cleanup at exit, which takes seconds if torch is imported.
        `one_stream`: errors go to the output's stream.
        """
        (stdin, write), (read, stdout), (errors, stderr), (status, theirs_status) = [
            os.pipe() for _ in range(4)
        ]
        theirs = [stdin, stdout, stderr, theirs_status]
        order = {
            "arguments": [str(argument) for argument in arguments],
            "command": self._command,
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "is_short": is_short,
        }
        fds = [stdin, stdout, stdout if one_stream else stderr, theirs_status]
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(order).encode()], fds)
            pid, (pidfd,), _, _ = socket.recv_fds(self._connection, 16, 1)
        for fd in theirs:
            os.close(fd)
        args = [*self._command, *order["arguments"]]
        streams = (os.fdopen(write, "w"), os.fdopen(read), os.fdopen(errors))
        return ForkedProcess(args, int(pid), pidfd, status, streams)


def _path(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def main() -> None:
    """Import the modules, and fork the program for each order, until the connection closes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    program, *imported = sys.argv[2:]
    sys.path.pop(0)  # the folder of the repository, which users' programs do not have
    for name in imported:
        importlib.import_module(name)
    statuses: dict[int, tuple[int, int]] = {}
    """The process id of each fork, and the pipe for its exit code, by a descriptor of the process."""
    while True:
        ready = select.select([connection, *statuses], [], [])[0]
        for pidfd in statuses.keys() & {*ready}:
            pid, status = statuses.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                os.write(status, str(code).encode())
            os.close(status)
            os.close(pidfd)
        if connection not in ready:
            continue
        order, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 4)
        if not order:
            return
        *standard, status = fds
        if (pid := os.fork()) == 0:
            connection.close()
            os.close(status)
            for pidfd, (_, other) in statuses.items():
                os.close(pidfd)
                os.close(other)
            become(program, **json.loads(order), standard=standard)
        pidfd = os.pidfd_open(pid)
        statuses[pidfd] = pid, status
        socket.send_fds(connection, [str(pid).encode()], [pidfd])
        for fd in standard:
            os.close(fd)


def become(
    program: str,
    arguments: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    is_short: bool,
    standard: Sequence[int],
) -> None:
    """Run a program in this process, as if it had been started with these arguments; then end."""
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    shown.show_environment(environment)
    if command:
        shown.show_arguments([*command, *arguments])
    hub_variables.read_again()
    os.chdir(folder)
    sys.path[1:1] = _path(environment)
    module, _, function = program.partition(":")
    sys.argv = [command[-1] if command else module.partition(".")[0], *arguments]
    sys.modules["__main__"].__package__ = None  # otherwise click calls the program `python -m …`
    run: Any = getattr(importlib.import_module(module), function)
    if not is_short:
        sys.exit(run())
    try:
        run()
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
    os._exit(code)


if __name__ == "__main__":
    main()
