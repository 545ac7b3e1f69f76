"""A stand-in for a fork server or a probe: a fork of a template runs in its place.

A fork server or probe imports torch, transformers and nnsight: six seconds of a core. In tests it asks a
template for a fork instead, and ends when the fork ends. The first stand-in starts the template
(`template`), with its own command, limits and variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

FOR = "for "
"""Prefix of the name of a stand-in; the process id of its fork follows."""
LISTENER = "TEST_TEMPLATE"
"""Variable of a template: the descriptor of its listening socket, and its name."""
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
"""Prefixes of variables that no import reads, or that a fork reads again."""
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
FOLDER = Path(__file__).parent
"""The folder of this run, with a link to this file."""


def begin(channel: int | None = None) -> None:
    """Ask a template for a fork in this process's place, once a request arrives on `channel`, if given.

    This process ends with the fork. Return if no template answers: this process then does its own work.
    """
    if channel is not None:
        select.select([channel], [], [])  # most servers of the tests load no model
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with connection, contextlib.suppress(OSError):
        _connect(connection, channel)
        if pid := _ask(connection, channel):
            _stand_in(connection, channel, pid)


def _connect(connection: socket.socket, channel: int | None) -> None:
    folder = FOLDER / _name()
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            _start_template(folder, channel)
        with contextlib.suppress(FileNotFoundError):  # the template starts or ends
            return connection.connect(str(folder / "socket"))
        time.sleep(0.01)


def _ask(connection: socket.socket, channel: int | None) -> str:
    """Return the process id of the fork; "" if the template ended before the fork."""
    order = {"environment": dict(os.environ), "folder": str(Path.cwd()), "cgroup": _cgroup()}
    fds = [0, 1, 2] if channel is None else [0, 1, 2, channel]
    socket.send_fds(connection, [json.dumps(order).encode()], fds)
    # The template still imports: this process must look busy meanwhile.
    while not select.select([connection], [], [], 0.2)[0]:
        pass
    return connection.recv(16).decode()


def _stand_in(connection: socket.socket, channel: int | None, pid: str) -> NoReturn:
    Path("/proc/self/comm").write_text(FOR + pid)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2) if channel is None else (channel,):
        os.dup2(nothing, descriptor)
    code = int(connection.recv(16) or -signal.SIGKILL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _name() -> str:
    """Return a hash of this process's initial state, without the parts that are sent with each order."""
    status = Path("/proc/self/status").read_text().splitlines()
    identity = [
        sys.argv[0],
        sys.executable,
        [argument for argument in sys.orig_argv if not argument.isdigit()],
        sorted(
            variable
            for variable in os.environ.items()
            if not f"{variable[0]}=".startswith(_READ_LATE)
        ),
        [line for line in status if line.startswith(_IN_STATUS)],
        Path("/proc/self/limits").read_text(),
        [line for line in _CGROUPS.read_text().splitlines() if _COUNTED not in line],
        [str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES],
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _cgroup() -> str:
    """Return the cgroup that counts this process's core-seconds, or the root cgroup."""
    lines = (line.partition(_COUNTED) for line in _CGROUPS.read_text().splitlines())
    return next((path for _, counted, path in lines if counted), "/")


def _start_template(folder: Path, channel: int | None) -> None:
    import shown  # in the folder of this file

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "new"))
    listener.listen(64)
    _ours, theirs = socket.socketpair()
    command = [
        str(theirs.fileno()) if argument == str(channel) else argument for argument in sys.orig_argv
    ]
    # A variable that marks the processes of one test must not mark a template, which outlives the test.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TEST_")}
    subprocess.Popen(
        [sys.executable, *command[1:]],
        pass_fds=[listener.fileno(), theirs.fileno()],
        env=shown.with_room({**plain, LISTENER: f"{listener.fileno()} {folder.name}"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (folder / "new").rename(folder / "socket")
