"""A stand-in for a model process that a host starts: it answers every frame at once, and imports no torch.

Usage: process.py BYTES -m MODULE ARGUMENTS..., as an interpreter is called, for the modules that a host
starts: ndif.runtime, ndif.runtime.measure, ndif.runtime.weights.fetch and
ndif.runtime.weights.checkpoint_metadata. A runner is a channel: it has no process to be killed, and ends
when its host closes that.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zstandard

from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import (
    Exited,
    ForkRunner,
    Load,
    LoadedModel,
    Ready,
    Returned,
    Run,
    RunReport,
    Signal,
    Verified,
)
from ndif.runtime.process.fork_server import OPTION, ForkServer, Programs
from ndif.runtime.process.zygote import end_with_parent
from ndif.runtime.sizing import ModelSize, RepositoryFacts
from ndif.runtime.spec import ModelSpec
from ndif.runtime.typed_json import to_json
from ndif.schema import wires

RESULT = wires.torch_bytes({})
COMPRESSED = zstandard.ZstdCompressor().compress(RESULT)
_LOOK_S = 0.01


class Model:
    """A zygote and all its runners, in one thread but for those that are busy."""

    def __init__(self, fd: int, size: int) -> None:
        self._control = FrameChannel(socket.socket(fileno=fd))
        self._size = size
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._control.socket, selectors.EVENT_READ)

    def be(self) -> None:
        """Answer until the host hangs up."""
        while True:
            for key, _ in self._ready.select():
                if key.data is not None:
                    self._be_runner(*key.data)
                elif not self._be_zygote():
                    return

    def _be_zygote(self) -> bool:
        try:
            order, _, fds = self._control.receive()
        except (EOFError, OSError):
            return False
        match order:
            case Signal.PING:
                self._control.send(Signal.PONG)
            case Load(spec):
                self._control.send(ready(spec, self._size))
            case ForkRunner(name, fresh, reused):
                channel = FrameChannel(socket.socket(fileno=fds[0]))
                runner = (channel, name, not fresh or reused)
                self._ready.register(channel.socket, selectors.EVENT_READ, runner)
                with contextlib.suppress(OSError):  # its host wants it no longer, as is read next
                    channel.send(Signal.IDLE)
            case Signal.VERIFY:
                self._control.send(Verified(0))
        return True

    def _be_runner(self, channel: FrameChannel, name: str, is_kept: bool) -> None:
        try:
            run, payload, _ = channel.expect(Run)
            channel.send(Signal.RUNNING)
            if payload[:1] == b"{":
                arguments = (channel, run, is_kept, json.loads(payload))
                threading.Thread(target=be_busy, args=arguments, daemon=True).start()
            else:
                finish(channel, run, is_kept)
        except (EOFError, OSError):
            self._ready.unregister(channel.socket)
            channel.socket.close()
            self._control.send(Exited(name, 0))


def be_busy(channel: FrameChannel, run: Run, is_kept: bool, wanted: dict[str, Any]) -> None:
    """Take the time that a payload asks for."""
    wait(**wanted)
    with contextlib.suppress(OSError):
        finish(channel, run, is_kept)


def finish(channel: FrameChannel, run: Run, is_kept: bool) -> None:
    """Answer a request, and be there for the next if the runner is kept."""
    content = COMPRESSED if run.compress_inline else RESULT
    channel.send(Returned(run.compress_inline, RunReport(0, ())), content)
    if is_kept:
        channel.send(Signal.IDLE)


def ready(spec: ModelSpec, size: int) -> Ready:
    """The report of a process that has loaded its model."""
    model = LoadedModel(
        "Nothing",
        size // 2,
        "bfloat16",
        spec.device or "cpu",
        spec.task or "text-generation",
        spec.checkpoint,
        None,
    )
    return Ready(model, 0.0, time.time(), exposed=False)


def wait(tell: str | None = None, for_s: float = 0.0) -> None:
    """Obey a payload: be busy for so long, and while a file is there, which names this process."""
    time.sleep(for_s)
    if tell is not None:
        Path(tell).write_text(str(os.getpid()))
        while Path(tell).exists():
            time.sleep(_LOOK_S)


def fetch() -> None:
    """Nothing is to be had."""
    print(to_json(RepositoryFacts("/nowhere")).decode(), flush=True)


def evaluate(fd: int, size: int) -> None:
    """Every model is as large."""
    answer(fd, ModelSize(size, size // 2))


def outline(fd: int) -> None:
    """No hub knows any model."""
    answer(fd, RepositoryFacts("/nowhere", card="text-generation"))


def answer(fd: int, said: ModelSize | RepositoryFacts) -> None:
    """Answer a question, whatever it is."""
    with socket.socket(fileno=fd) as connection:
        if connection.makefile("r").readline():
            connection.sendall(to_json(said) + b"\n")


def main() -> None:
    """Be what the interpreter was called for."""
    end_with_parent()
    size, _, module, *arguments = sys.argv[1:]
    programs: Programs = {
        "ndif.runtime": lambda fd: Model(fd, int(size)).be(),
        "ndif.runtime.measure": lambda fd: evaluate(fd, int(size)),
        "ndif.runtime.weights.checkpoint_metadata": outline,
    }
    if OPTION in arguments:
        ForkServer(FrameChannel(socket.socket(fileno=int(arguments[0]))), programs).serve()
    elif module == "ndif.runtime.weights.fetch":
        fetch()
    elif module in programs:
        programs[module](int(arguments[0]))
    else:
        raise SystemExit(f"there is no {module} here")


if __name__ == "__main__":
    main()
