"""The fork server: a process that has imported the libraries of model processes, and forks them.

A forked model process starts in milliseconds instead of seconds, and shares the pages of torch,
transformers and nnsight with the others. The server has one thread, never starts CUDA, loads no model and
runs no user code. Each server belongs to one runtime and one environment: libraries read variables on
import, so a server's children have exactly the server's environment.
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

from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import StartModule
from ndif.runtime.process import zygote
from ndif.runtime.process.children import (
    end_with_parent,
    ended_children,
    fork,
    wake_for_children,
)

STATUS = struct.Struct("!i")
"""A report about a child: its process id after the fork, and its exit code when it has ended."""

OPTION = "--fork-server"
"""Option of `python -m ndif.runtime` for a fork server instead of a model process."""
UNTRUSTED = "--untrusted"
"""Option of a fork server whose model processes have runners that are confined, and may be reset."""

_IMPORTED = (
    "torch",
    "transformers",
    "transformers.pipelines",
    "safetensors.torch",
    "ndif.runtime.measure",
    "ndif.runtime.weights.checkpoint_metadata",
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
_UNTRUSTED_MODULES = ("ndif.sandbox.protector", "ndif.runtime.process.reset")
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_ARGUMENTS = 45
"""Index of `arg_start` among the fields of /proc/self/stat after the command's name."""


class CannotForkError(Exception):
    """An import started CUDA in the server, so that no child could use it."""


def main(fd: int, generation: str, *, untrusted: bool) -> None:
    """Import the modules for model processes of `generation`, then fork processes until the host hangs up.

    With `untrusted`, also import the modules for confined runners.
    """
    end_with_parent()
    previous = os.environ.get(_NVML_CHECK)
    # Modules that look for GPUs on import then make torch ask NVML, which does not start CUDA.
    os.environ[_NVML_CHECK] = "1"
    for name in _IMPORTED:
        importlib.import_module(name)
    # The machine may lack system libraries for these modules; a confined child then reports the error.
    for name in _CONFINEMENT:
        with contextlib.suppress(ImportError, RuntimeError, OSError):
            importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from ndif.runtime.generations import create_generation
    from ndif.runtime.process.cuda import Cuda

    create_generation(generation)
    # The first call compiles the patterns of all architectures; children inherit them.
    get_checkpoint_conversion_mapping("")
    if previous is None:
        del os.environ[_NVML_CHECK]
    else:
        os.environ[_NVML_CHECK] = previous
    if untrusted:
        _prepare_reset()
    if early_start := Cuda().find_early_start():
        raise CannotForkError(early_start)
    ForkServer(FrameChannel(socket.socket(fileno=fd)), _PROGRAMS).serve()


def _prepare_reset() -> None:
    """Import the policy and the reset, and copy the namespaces that a reset restores."""
    for name in _UNTRUSTED_MODULES:
        importlib.import_module(name)
    from ndif.runtime.process.namespaces import Namespaces

    Namespaces.of_fork_server = Namespaces(functions=False)


def _measure(fd: int) -> None:
    from ndif.runtime.measure import main

    main(fd)


def _outline(fd: int) -> None:
    from ndif.runtime.weights.checkpoint_metadata import main

    main(fd)


Programs = Mapping[str, Callable[[int], None]]
"""The entry points, by the module that the host would start as `python -m MODULE FD`."""

_PROGRAMS: Programs = {
    "ndif.runtime": zygote.main,
    "ndif.runtime.measure": _measure,
    "ndif.runtime.weights.checkpoint_metadata": _outline,
}


class ForkServer:
    """Forks children on request, and reports their ends.

    A request is one frame that names a module and carries three descriptors: a channel for reports about
    the child, a pipe for the child's output, and the child's own channel to its host. The server never
    reads from the children's channels, so no child inherits another's secrets in its memory.
    """

    def __init__(self, control: FrameChannel, programs: Programs) -> None:
        self._control = control
        self._programs = programs
        self._children: dict[int, socket.socket] = {}
        """The channels for reports, by the process ids of the children."""

    def serve(self) -> NoReturn:
        """Fork children and report their ends until the host hangs up."""
        os.close(os.pidfd_open(os.getpid()))  # fail early: kernels before Linux 5.3 have no pidfds
        # Frozen objects are not scanned by children, whose collector would copy their pages.
        gc.collect()
        gc.freeze()
        wake, woken = wake_for_children()
        self._own_sockets = [self._control.socket, wake, woken]
        while True:
            ready = wait([wake, self._control.socket])
            if wake in ready:
                wake.recv(4096)
                self._reap()
            if self._control.socket in ready:
                self._handle_order()

    def _handle_order(self) -> None:
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
            status.close()  # reports the failed fork to the host
        else:
            self._children[pid] = status
            with contextlib.suppress(OSError):  # the host has closed the channel
                # Once the child is reaped, its id may be reused; a pidfd stays valid.
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
        """Run a module in the forked child as `python -m MODULE FD` would; return the exit code."""
        os.setsid()
        for connection in [*self._own_sockets, *self._children.values(), status]:
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
    """Reseed numpy and torch in a fork; Python reseeds its own generator."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.seed()


def _name_process(arguments: Sequence[str]) -> None:
    """Change the command line of this process, in /proc and in Python."""
    sys.argv[1:] = arguments[2:]
    sys.orig_argv[1:] = arguments
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(stat[_ARGUMENTS]), int(stat[_ARGUMENTS + 1])
    text = b"".join(os.fsencode(argument) + b"\0" for argument in sys.orig_argv)
    # A command line that is longer than the server's does not fit and is not written.
    if 0 < len(text) <= end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
