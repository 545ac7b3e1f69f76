"""The fork server: a process that has imported what every model process imports, and forks them.

A model process that is forked starts in milliseconds instead of seconds, and shares the pages of torch,
transformers and nnsight with the others. The server has one thread, never starts CUDA, loads no model and
runs no user's code. Each server belongs to one runtime and one environment: libraries read variables when
they are imported, so a server's children have exactly the server's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from ndif.runtime.frames import Channel
from ndif.runtime.messages import StartModule
from ndif.runtime.process import zygote
from ndif.runtime.process.children import (
    end_with_parent,
    ended_children,
    fork,
    wake_for_children,
)

STATUS = struct.Struct("!i")
"""A number that the server reports of a child: first its process id, at its end its exit code."""

OPTION = "--fork-server"
"""Option of `python -m ndif.runtime` that asks for a fork server instead of a model process."""
UNTRUSTED = "--untrusted"
"""Option that asks for what processes need whose runners are confined, and reset between requests."""

_IMPORTED = (
    "torch",
    "transformers",
    "transformers.pipelines",
    "safetensors.torch",
    "ndif.runtime.measure",
    "ndif.runtime.weights.outline",
    "ndif.runtime.process.forking",
    "ndif.runtime.process.heap",
    "ndif.runtime.process.runner",
    "ndif.runtime.process.isolation",
    "ndif.runtime.process.weight_owner",
)
_CONFINEMENT = (
    "ndif.sandbox.confinement.landlock",
    "ndif.sandbox.confinement.seccomp",
)
_OF_UNTRUSTED = ("ndif.sandbox.protector", "ndif.runtime.process.reset")
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_ARGUMENTS = 45
"""Position of the arguments' first address in /proc/self/stat, counted after the command's name."""


class CannotForkError(Exception):
    """Something started CUDA in the server, so that no child could use it."""


def main(fd: int, generation: str, *, untrusted: bool) -> None:
    """Import what model processes of `generation` need, then fork them until the host hangs up.

    `untrusted`: their runners are confined.
    """
    end_with_parent()
    given = os.environ.get(_NVML_CHECK)
    # A module that asks torch for GPUs as it is imported then asks NVML, which starts nothing.
    os.environ[_NVML_CHECK] = "1"
    for name in _IMPORTED:
        importlib.import_module(name)
    # They look for libraries of the system, which a machine may lack; a confined child then says so.
    for name in _CONFINEMENT:
        with contextlib.suppress(ImportError, RuntimeError, OSError):
            importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from ndif.runtime.generations import create_generation
    from ndif.runtime.process.cuda import Cuda

    create_generation(generation)
    # Whichever architecture is asked for first, transformers compiles the patterns of all.
    get_checkpoint_conversion_mapping("")
    if given is None:
        del os.environ[_NVML_CHECK]
    else:
        os.environ[_NVML_CHECK] = given
    if untrusted:
        _prepare_reset()
    if reached := Cuda().find_early_start():
        raise CannotForkError(reached)
    ForkServer(Channel(socket.socket(fileno=fd)), _PROGRAMS).serve()


def _prepare_reset() -> None:
    """Import the policy and the reset, and copy the namespaces that a reset restores, for all zygotes."""
    for name in _OF_UNTRUSTED:
        importlib.import_module(name)
    from ndif.runtime.process.namespaces import Namespaces

    Namespaces.of_fork_server = Namespaces(functions=False)


def _measure(fd: int) -> None:
    from ndif.runtime.measure import main

    main(fd)


def _outline(fd: int) -> None:
    from ndif.runtime.weights.outline import main

    main(fd)


Programs = Mapping[str, Callable[[int], None]]
"""For each module that a host may start with `python -m MODULE FD`, the function that runs it."""

_PROGRAMS: Programs = {
    "ndif.runtime": zygote.main,
    "ndif.runtime.measure": _measure,
    "ndif.runtime.weights.outline": _outline,
}


class ForkServer:
    """Forks children on request, and reports how each one ended to the host that asked for it.

    A request is one frame that names a module and carries three descriptors: a channel on which the server
    reports of the child, a pipe for what the child prints, and the child's own channel to its host. The
    server reads nothing that its children are told, so no child finds another's secrets in its memory.
    """

    def __init__(self, control: Channel, programs: Programs) -> None:
        self._control = control
        self._programs = programs
        self._children: dict[int, socket.socket] = {}
        """The channel on which a child's end is reported, by process id."""

    def serve(self) -> NoReturn:
        """Fork on request, report who ended, end with the host."""
        os.close(os.pidfd_open(os.getpid()))  # fails where the kernel has none: before Linux 5.3
        # Children neither scan what was imported nor copy its pages by counting references.
        gc.collect()
        gc.freeze()
        wake, woken = wake_for_children()
        self._own = [self._control.socket, wake, woken]
        while True:
            ready = wait([wake, self._control.socket])
            if wake in ready:
                wake.recv(4096)
                self._reap()
            if self._control.socket in ready:
                self._obey()

    def _obey(self) -> None:
        try:
            order, _, fds = self._control.expect(StartModule)
        except (EOFError, ConnectionError):
            os._exit(0)
        status_fd, output, channel = fds
        status = socket.socket(fileno=status_fd)
        try:
            pid = fork(lambda: self._run(status, output, order.module, channel))
        except OSError:
            traceback.print_exc()
            status.close()  # by which the host knows
        else:
            self._children[pid] = status
            with contextlib.suppress(OSError):  # the host does not wait any more
                # A number may be given to another process once this one is reaped. A descriptor is not.
                process = os.pidfd_open(pid)
                try:
                    socket.send_fds(status, [STATUS.pack(pid)], [process])
                finally:
                    os.close(process)
        os.close(output)
        os.close(channel)

    def _reap(self) -> None:
        for pid, code in ended_children():
            with self._children.pop(pid) as channel, contextlib.suppress(OSError):
                channel.send(STATUS.pack(code))

    def _run(self, status: socket.socket, output: int, module: str, channel: int) -> int:
        """Be as a process that was started with `python -m MODULE FD`; return its exit code."""
        os.setsid()
        for connection in [*self._own, *self._children.values(), status]:
            connection.close()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        _name_process(["-m", module, str(channel)])
        _reseed()
        try:
            self._programs[module](channel)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.stdout.flush()
        return 0


def _reseed() -> None:
    """Give this process random numbers of its own; Python's own generator sees to itself."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.seed()


def _name_process(arguments: Sequence[str]) -> None:
    """Change the command line that the system shows of this process, and that Python knows."""
    sys.argv[1:] = arguments[2:]
    sys.orig_argv[1:] = arguments
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[_ARGUMENTS]), int(stat[_ARGUMENTS + 1])
    text = b"".join(os.fsencode(argument) + b"\0" for argument in sys.orig_argv)
    # What is longer than the server's own has no room.
    if 0 < len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
