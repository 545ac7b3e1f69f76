"""A stand-in for a model process: it answers every frame at once, and does not import torch.

Usage: process.py BYTES -m MODULE ARGUMENTS..., like an interpreter, for the modules that a host starts:
ndif.runtime, ndif.runtime.measure, ndif.runtime.weights.fetch and ndif.runtime.weights.checkpoint_metadata.
A runner is only a channel, without a process, and ends when its host closes the channel.
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
    """A zygote and all its runners in one thread; each busy runner has its own thread."""

    def __init__(self, fd: int, size: int) -> None:
        self._control = FrameChannel(socket.socket(fileno=fd))
        self._size = size
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._control.socket, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answer until the host closes the channel."""
        while True:
            for key, _ in self._ready.select():
                if key.data is not None:
                    self._answer_as_runner(*key.data)
                elif not self._answer_as_zygote():
                    return

    def _answer_as_zygote(self) -> bool:
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
                with contextlib.suppress(
                    OSError
                ):  # the host has closed the channel; a later read notices it
                    channel.send(Signal.IDLE)
            case Signal.VERIFY:
                self._control.send(Verified(0))
        return True

    def _answer_as_runner(self, channel: FrameChannel, name: str, is_kept: bool) -> None:
        try:
            run, payload, _ = channel.expect(Run)
            channel.send(Signal.RUNNING)
            if payload[:1] == b"{":
                arguments = (channel, run, is_kept, json.loads(payload))
                threading.Thread(target=work, args=arguments, daemon=True).start()
            else:
                finish(channel, run, is_kept)
        except (EOFError, OSError):
            self._ready.unregister(channel.socket)
            channel.socket.close()
            self._control.send(Exited(name, 0))


def work(channel: FrameChannel, run: Run, is_kept: bool, options: dict[str, Any]) -> None:
    """Wait as a payload demands, then answer."""
    wait(**options)
    with contextlib.suppress(OSError):
        finish(channel, run, is_kept)


def finish(channel: FrameChannel, run: Run, is_kept: bool) -> None:
    """Answer a request, and report that the runner is idle if it is kept."""
    content = COMPRESSED if run.compress_inline else RESULT
    channel.send(Returned(run.compress_inline, RunReport(0, ())), content)
    if is_kept:
        channel.send(Signal.IDLE)


def ready(spec: ModelSpec, size: int) -> Ready:
    """Return the report of a process that has loaded its model."""
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
    """Sleep for `for_s`; then write this process's id to the file `tell`, and wait for its removal."""
    time.sleep(for_s)
    if tell is not None:
        Path(tell).write_text(str(os.getpid()))
        while Path(tell).exists():
            time.sleep(_LOOK_S)


def fetch() -> None:
    """Print the facts of a repository without files."""
    print(to_json(RepositoryFacts("/nowhere")).decode(), flush=True)


def evaluate(fd: int, size: int) -> None:
    """Answer that a model has `size` bytes."""
    answer(fd, ModelSize(size, size // 2))


def outline(fd: int) -> None:
    """Answer with the facts of a repository without files."""
    answer(fd, RepositoryFacts("/nowhere", card="text-generation"))


def answer(fd: int, facts: ModelSize | RepositoryFacts) -> None:
    """Answer any question with these facts."""
    with socket.socket(fileno=fd) as connection:
        if connection.makefile("r").readline():
            connection.sendall(to_json(facts) + b"\n")


def main() -> None:
    """Run the stand-in of the module in the arguments."""
    end_with_parent()
    size, _, module, *arguments = sys.argv[1:]
    programs: Programs = {
        "ndif.runtime": lambda fd: Model(fd, int(size)).serve(),
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
