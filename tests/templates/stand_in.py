"""Templates: fork servers that have imported, of which those that tests start are forks.

A fork server imports torch, transformers and nnsight: six seconds of a core. In tests it asks a template
for a fork of itself, which serves in its place, and ends with that. A template is a fork server as well,
started by the first that asks, with the same command, limits and variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

FOR = "for "
"""Begins the name of a process that stands in for a fork; then follows the fork's process id."""
LISTENER = "TEST_TEMPLATE"
"""Variable of a template: the descriptor on which it is asked, and its name; padded to make room."""
IDLE_S = 600.0
"""Seconds without a fork that lives after which a template ends."""
_ROOM = 4096
_ENV_START, _ENV_END = 47, 48
"""Positions in /proc/self/stat, counted after the command's name."""
_PR_SET_PDEATHSIG = 1
_READ_LATE = (
    "HF_",
    "NDIF_",
    "TEST_",
    "PYTEST_",
    "COLUMNS",
    "NO_COLOR",
    "_=",
    "PWD",
    "OLDPWD",
    "SHLVL",
)
"""Prefixes of variables that nothing reads as it is imported, or that are read again."""
_IN_STATUS = (
    "Uid",
    "Gid",
    "Groups",
    "CapEff",
    "CapBnd",
    "NoNewPrivs",
    "Seccomp",
    "Cpus_allowed:",
    "Umask",
)
_NAMESPACES = ("mnt", "net", "pid", "user", "ipc", "uts")
_CGROUPS, _COUNTED = Path("/proc/self/cgroup"), ":cpuacct:"
_MAX_BYTES = 1 << 20
_FOLDER = Path(__file__).parent
"""A folder of the run's own, with a link to this file."""


def begin(channel: int) -> None:
    """Be a template, or wait until this fork server is asked to fork, and have a template do that."""
    if listener := os.environ.pop(LISTENER, None):
        fd, name = listener.split()
        _become_template(socket.socket(fileno=int(fd)), _FOLDER / name)
    else:
        select.select([channel], [], [])  # most servers of the tests load no model
        _serve_from_template(channel)


def _serve_from_template(channel: int) -> None:
    """Ask a template for a fork that serves on `channel`, and end with it; return if none answers."""
    folder = _FOLDER / _name()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            _start_template(folder, channel)
        with contextlib.suppress(FileNotFoundError):  # it is being made, or ends
            connection.connect(str(folder / "socket"))
            break
        time.sleep(0.01)
    order = {"environment": dict(os.environ), "folder": str(Path.cwd()), "cgroup": _cgroup()}
    try:
        socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2, channel])
        # It imports: this process must be seen to live.
        while not select.select([connection], [], [], 0.2)[0]:
            pass
        if not (pid := connection.recv(16)):
            return  # it ended before it has forked
    except OSError:
        return
    Path("/proc/self/comm").write_text(FOR + pid.decode())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, channel)
    code = int(connection.recv(16) or -signal.SIGKILL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _name() -> str:
    """Return a name of all that a fork server has from its start, but for what is handed over."""
    status = Path("/proc/self/status").read_text().splitlines()
    identity = [
        sys.argv[0],
        sys.executable,
        [each for each in sys.orig_argv if not each.isdigit()],
        sorted(each for each in os.environ.items() if not f"{each[0]}=".startswith(_READ_LATE)),
        [line for line in status if line.startswith(_IN_STATUS)],
        Path("/proc/self/limits").read_text(),
        [each for each in _CGROUPS.read_text().splitlines() if _COUNTED not in each],
        [str(Path(f"/proc/self/ns/{each}").readlink()) for each in _NAMESPACES],
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _cgroup() -> str:
    """Return the cgroup that counts this process's core-seconds; the first of all where none does."""
    found = (each.partition(_COUNTED) for each in _CGROUPS.read_text().splitlines())
    return next((path for _, counted, path in found if counted), "/")


def _count_in(cgroup: str) -> None:
    with contextlib.suppress(OSError):
        Path(f"/sys/fs/cgroup/cpuacct/{cgroup}/cgroup.procs").write_text(str(os.getpid()))


def _start_template(folder: Path, channel: int) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "new"))
    listener.listen(64)
    _ours, theirs = socket.socketpair()
    command = [str(theirs.fileno()) if each == str(channel) else each for each in sys.orig_argv]
    subprocess.Popen(
        [sys.executable, *command[1:]],
        pass_fds=[listener.fileno(), theirs.fileno()],
        env={**os.environ, LISTENER: f"{listener.fileno()} {folder.name}".ljust(_ROOM)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / "new").rename(folder / "socket")


def _become_template(listener: socket.socket, folder: Path) -> None:
    """Make the fork server of this process fork itself for each that asks, once it has imported."""
    import hub_variables  # beside this file, where a process of the tests finds both

    from ndif.runtime.process import fork_server

    fork_server.end_with_parent = lambda: None  # type: ignore[assignment]

    class Programs(dict[str, Callable[[int], None]]):
        """With all `MODULE ARGUMENT` of the tests, whose `main` gets the argument as well."""

        def __missing__(self, name: str) -> Callable[[int], None]:
            module, argument = name.split(" ", 1)
            sys.path.append(str(Path(__file__).resolve().parents[2]))
            main: Callable[[int, str], None] = importlib.import_module(module).main
            return lambda fd: main(fd, argument)

    class Template(fork_server.ForkServer):
        def serve(self) -> NoReturn:
            gc.collect()
            gc.freeze()
            _count_in("/")
            forks: dict[int, tuple[int, socket.socket]] = {}
            owner = os.pidfd_open(int((_FOLDER / "owner").read_text()))
            while True:
                waited = [listener, owner, *forks, *(asker for _, asker in forks.values())]
                ready = select.select(waited, [], [], None if forks else IDLE_S)[0]
                if owner in ready or not ready:
                    with contextlib.suppress(OSError):  # the tests have ended
                        (folder / "socket").unlink()
                        folder.rmdir()
                    os._exit(0)
                for pidfd, (pid, asker) in list(forks.items()):
                    if asker in ready:  # it has ended
                        os.kill(pid, signal.SIGKILL)
                    if asker in ready or pidfd in ready:
                        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                        with contextlib.suppress(OSError):
                            asker.send(str(code).encode())
                        del forks[pidfd]
                        asker.close()
                        os.close(pidfd)
                if listener in ready:
                    asker, _ = listener.accept()
                    order, fds, _, _ = socket.recv_fds(asker, _MAX_BYTES, 4)
                    if not order:
                        asker.close()
                        continue
                    if (pid := os.fork()) == 0:
                        for pidfd, (_, other) in forks.items():
                            os.close(pidfd)
                            other.close()
                        for each in (listener, asker, self._control.socket):
                            each.close()
                        os.close(owner)
                        _serve(fds, self._programs, **json.loads(order))
                    forks[os.pidfd_open(pid)] = pid, asker
                    for fd in fds:
                        os.close(fd)
                    asker.send(str(pid).encode())

    def _serve(
        fds: list[int], programs: Any, environment: dict[str, str], folder: str, cgroup: str
    ) -> NoReturn:
        _count_in(cgroup)
        *standard, channel = fds
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        _write_environment(environment)
        hub_variables.read_again()
        os.chdir(folder)
        os.setsid()
        _end_with_parent()
        try:
            real(fork_server.Channel(socket.socket(fileno=channel)), Programs(programs)).serve()
        finally:
            os._exit(1)

    real, fork_server.ForkServer = fork_server.ForkServer, Template  # type: ignore[misc]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_environment(environment: Mapping[str, str]) -> None:
    """Change the variables that the system shows of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)
