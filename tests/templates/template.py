"""A template: a process that has imported the slow modules, and forks itself for each `stand_in`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hub_variables  # in the folder of this file
import shown
from stand_in import FOLDER, LISTENER

from ndif.runtime.process import children, fork_server

_IDLE_S = 600.0
"""Seconds without a living fork after which a template ends."""
_MAX_BYTES = 1 << 20
_OF_PROBES = (
    *("torch", "numpy", "sympy", "pydantic", "httpx", "rich", "accelerate"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    "transformers.models.gpt2.modeling_gpt2",
)
"""Modules that the clients of probes import. nnsight reads variables at import, so each fork imports it."""
_RealForkServer = fork_server.ForkServer


def of_fork_servers() -> None:
    """Make the fork server of this process a template, once it has imported its modules."""
    fork_server.end_with_parent = lambda: None  # a template outlives the process that started it
    fork_server.ForkServer = ForkServer  # type: ignore[misc]


def of_probes() -> None:
    """Import the modules and serve as a template; return in each fork, which is a probe."""
    for name in _OF_PROBES:
        importlib.import_module(name)
    Template().serve()
    sys.meta_path.insert(0, ImportOfClient)  # type: ignore[arg-type]


class ImportOfClient:
    """A meta path finder that reads the hub's variables again when a probe imports its client.

    The probe has set its variables by then.
    """

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Find nothing; see `importlib.abc.MetaPathFinder.find_spec`."""
        if name == "nnsight":
            hub_variables.read_again()


class Programs(dict[str, Callable[[int], None]]):
    """Programs of a fork server, and each `MODULE ARGUMENT` of the tests; `main` gets the argument, too."""

    def __missing__(self, name: str) -> Callable[[int], None]:
        """Return a program of the tests."""
        module, argument = name.split(" ", 1)
        sys.path.append(str(Path(__file__).resolve().parents[2]))
        main: Callable[[int, str], None] = importlib.import_module(module).main
        return lambda fd: main(fd, argument)


class ForkServer(fork_server.ForkServer):
    """A template in the place of a fork server."""

    def serve(self) -> NoReturn:
        """Serve as a template; in each fork, serve the channel of its stand-in."""
        [channel] = Template().serve()
        self._control.socket.close()
        control = fork_server.FrameChannel(socket.socket(fileno=channel))
        _RealForkServer(control, Programs(self._programs)).serve()


class Template:
    """Forks itself on request. A template ends with the run. A fork ends with its template or stand-in."""

    def serve(self) -> list[int]:
        """Fork for each stand-in, and send it the exit code of its fork.

        Return in each fork, with the descriptors that its stand-in passed beside the standard streams.
        """
        gc.collect()
        gc.freeze()
        _count_in("/")
        fd, name = os.environ.pop(LISTENER).split()
        del os.environ[shown.ROOM]
        self._listener = socket.socket(fileno=int(fd))
        self._owner = os.pidfd_open(int((FOLDER / "owner").read_text()))
        self._forks: dict[int, tuple[int, socket.socket]] = {}
        """The process id and the stand-in of each fork, by a descriptor of the process."""
        while True:
            stand_ins = [stand_in for _, stand_in in self._forks.values()]
            waited = [self._listener, self._owner, *self._forks, *stand_ins]
            ready = select.select(waited, [], [], None if self._forks else _IDLE_S)[0]
            if self._owner in ready or not ready:
                with contextlib.suppress(OSError):  # the run has ended
                    (FOLDER / name / "socket").unlink()
                    (FOLDER / name).rmdir()
                os._exit(0)
            for descriptor, (_, stand_in) in [*self._forks.items()]:
                if descriptor in ready or stand_in in ready:
                    self._reap(descriptor)
            if self._listener in ready:
                descriptors = self._answer(self._listener.accept()[0])
                if descriptors is not None:
                    return descriptors

    def _reap(self, descriptor: int) -> None:
        """Send a fork's exit code to its stand-in; kill the fork's group if the stand-in ended first."""
        pid, stand_in = self._forks.pop(descriptor)
        with contextlib.suppress(ProcessLookupError):
            if not select.select([descriptor], [], [], 0)[0]:
                os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with stand_in, contextlib.suppress(OSError):
            stand_in.send(str(code).encode())
        os.close(descriptor)

    def _answer(self, stand_in: socket.socket) -> list[int] | None:
        """Fork for a stand-in, unless it was killed; return descriptors in the fork, otherwise None."""
        try:
            order, fds, _, _ = socket.recv_fds(stand_in, _MAX_BYTES, 4)
        except OSError:
            order, fds = b"", []
        if not order:
            stand_in.close()
            return None
        begin, may_begin = os.pipe()
        if (pid := os.fork()) == 0:
            os.setsid()
            os.close(begin)
            os.close(may_begin)
            for descriptor, (_, other) in self._forks.items():
                os.close(descriptor)
                other.close()
            for channel in (self._listener, stand_in):
                channel.close()
            os.close(self._owner)
            return _become(fds, **json.loads(order))
        os.close(may_begin)
        os.read(begin, 1)  # until the fork has its own process group
        os.close(begin)
        self._forks[os.pidfd_open(pid)] = pid, stand_in
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            stand_in.send(str(pid).encode())
        return None


def _become(fds: list[int], environment: dict[str, str], folder: str, cgroup: str) -> list[int]:
    """Take on this environment and folder; return the descriptors that are not standard streams."""
    children.end_with_parent()
    _count_in(cgroup)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    shown.show_environment(environment)
    hub_variables.read_again()
    os.chdir(folder)
    return fds[3:]


def _count_in(cgroup: str) -> None:
    """Count this process's core-seconds in a cgroup, if it exists."""
    with contextlib.suppress(OSError):
        Path(f"/sys/fs/cgroup/cpuacct/{cgroup}/cgroup.procs").write_text(str(os.getpid()))
