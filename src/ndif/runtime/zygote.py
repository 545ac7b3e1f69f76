"""The model process: holds the weights, forks runners, never runs user code.

It has one thread for as long as it lives, so that a fork finds no pool that lost its threads, and its
runners share the weights copy-on-write.
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ndif.runtime.frames import Channel
from ndif.runtime.spec import ModelSpec

_PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    """Load what the host asks for, then fork runners until it hangs up."""
    control = Channel(socket.socket(fileno=fd))
    header, _, _ = control.receive()
    spec = ModelSpec.of(header["spec"])
    try:
        zygote = Zygote(control, spec)
    except Exception as error:
        traceback.print_exc()
        control.send({"kind": "failed"}, f"{type(error).__name__}: {error}".encode())
        return
    zygote.serve()


class Zygote:
    """The parent of every runner of one model."""

    def __init__(self, control: Channel, spec: ModelSpec) -> None:
        import torch

        from ndif.runtime import progress
        from ndif.runtime.generations import adapter
        from ndif.runtime.warming import warm_up

        torch.set_num_threads(1)
        self._control = control
        self._spec = spec
        self._runners: dict[int, str] = {}
        self._generation = adapter(spec.generation)
        progress.report(
            lambda done, total: control.send({"kind": "progress", "done": done, "total": total})
        )
        started = time.perf_counter()
        self._generation.load(spec)
        loaded, loaded_at = time.perf_counter(), time.time()
        warm_up(self._generation.model)
        # What is here now stays: runners neither scan it nor copy its pages by counting references.
        gc.collect()
        gc.freeze()
        served = describe(self._generation.model, spec)
        control.send(
            {"kind": "ready", "model": served, "load_s": loaded - started, "loaded_at": loaded_at}
        )

    def serve(self) -> None:
        """Fork on request, report who ended, leave with the host."""
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control.socket, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        wake.recv(4096)
                        self._reap()
                    else:
                        try:
                            header, _, fds = self._control.receive()
                        except (EOFError, ConnectionError):
                            self._end()
                        self._fork(header["runner"], fds[0])

    def _fork(self, runner: str, fd: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_runner(fd)
        os.close(fd)
        self._runners[pid] = runner
        self._control.send({"kind": "forked", "runner": runner, "pid": pid})

    def _become_runner(self, fd: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # A runner does not outlive its zygote, whatever it is doing.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._control.socket.close()

            from ndif.runtime.runner import Runner

            Runner(Channel(socket.socket(fileno=fd)), self._generation, self._spec.threads).serve()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            runner = self._runners.pop(pid, None)
            if runner is not None:
                code = os.waitstatus_to_exitcode(status)
                self._control.send({"kind": "exited", "runner": runner, "code": code})

    def _end(self) -> NoReturn:
        for pid in self._runners:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def describe(model: Any, spec: ModelSpec) -> dict[str, Any]:
    """What the host may tell others about the loaded model."""
    from transformers.utils import cached_file

    config = cached_file(spec.checkpoint, "config.json", revision=spec.revision)
    module = model._module
    return {
        "class": type(module).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "dtype": str(module.dtype).removeprefix("torch."),
        "device": str(module.device),
        "task": getattr(model, "task", None),
        "folder": str(Path(config).parent),
    }
