"""A stand-in for a model process that a host starts: it answers every frame at once, and imports no torch.

Usage: process.py BYTES -m MODULE ARGUMENTS..., as an interpreter is called, for the modules that a host
starts: ndif.runtime, ndif.runtime.measure, ndif.runtime.weights.fetch and ndif.runtime.weights.outline. A
runner is a channel: it has no process to be killed, and ends when its host closes that.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zstandard

from ndif.runtime.frames import Channel, Header
from ndif.runtime.process.fork_server import OPTION, ForkServer, Programs
from ndif.runtime.process.zygote import end_with_parent
from ndif.schema import wires

RESULT = wires.torch_bytes({})
COMPRESSED = zstandard.ZstdCompressor().compress(RESULT)
_LOOK_S = 0.01
META = {"execution_time": 0.0, "peak_memory": 0}


class Model:
    """A zygote and all its runners, in one thread but for those that are busy."""

    def __init__(self, fd: int, size: int) -> None:
        self._control = Channel(socket.socket(fileno=fd))
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
            header, _, fds = self._control.receive()
        except (EOFError, OSError):
            return False
        match header["kind"]:
            case "ping":
                self._control.send({"kind": "pong"})
            case "load":
                self._control.send(ready(header["spec"], self._size))
            case "fork":
                channel = Channel(socket.socket(fileno=fds[0]))
                is_kept = not header["fresh"] or header["reused"]
                runner = (channel, header["runner"], is_kept)
                self._ready.register(channel.socket, selectors.EVENT_READ, runner)
                with contextlib.suppress(OSError):  # its host wants it no longer, as is read next
                    channel.send({"kind": "idle"})
            case "verify":
                self._control.send({"kind": "verified", "restored": 0})
        return True

    def _be_runner(self, channel: Channel, name: str, is_kept: bool) -> None:
        try:
            header, payload, _ = channel.receive()
            channel.send({"kind": "running"})
            if payload[:1] == b"{":
                arguments = (channel, header, is_kept, json.loads(payload))
                threading.Thread(target=be_busy, args=arguments, daemon=True).start()
            else:
                finish(channel, header, is_kept)
        except (EOFError, OSError):
            self._ready.unregister(channel.socket)
            channel.socket.close()
            self._control.send({"kind": "exited", "runner": name, "code": 0})


def be_busy(channel: Channel, header: Header, is_kept: bool, wanted: dict[str, Any]) -> None:
    """Take the time that a payload asks for."""
    wait(**wanted)
    with contextlib.suppress(OSError):
        finish(channel, header, is_kept)


def finish(channel: Channel, header: Header, is_kept: bool) -> None:
    """Answer a request, and be there for the next if the runner is kept."""
    compressed = header["compress_inline"]
    content = COMPRESSED if compressed else RESULT
    channel.send({"kind": "result", "compressed": compressed, "meta": META}, content)
    if is_kept:
        channel.send({"kind": "idle"})


def ready(spec: Mapping[str, Any], size: int) -> Header:
    """The report of a process that has loaded its model."""
    model = {
        "class": "Nothing",
        "parameters": size // 2,
        "dtype": "bfloat16",
        "device": spec["device"] or "cpu",
        "task": spec["task"] or "text-generation",
        "folder": spec["checkpoint"],
        "repo_id": None,
    }
    return {
        "kind": "ready",
        "exposed": False,
        "model": model,
        "load_s": 0.0,
        "loaded_at": time.time(),
    }


def wait(tell: str | None = None, for_s: float = 0.0) -> None:
    """Obey a payload: be busy for so long, and while a file is there, which names this process."""
    time.sleep(for_s)
    if tell is not None:
        Path(tell).write_text(str(os.getpid()))
        while Path(tell).exists():
            time.sleep(_LOOK_S)


def fetch() -> None:
    """Nothing is to be had."""
    found = {"repo_id": None, "card": None, "gated": False, "folder": "/nowhere"}
    print(json.dumps(found), flush=True)


def evaluate(fd: int, size: int) -> None:
    """Every model is as large."""
    answer(fd, {"bytes": size, "parameters": size // 2})


def outline(fd: int) -> None:
    """No hub knows any model."""
    known = {"card": "text-generation", "repo_id": None, "gated": False, "commit": None}
    answer(fd, {"folder": "/nowhere", **known})


def answer(fd: int, said: Mapping[str, Any]) -> None:
    """Answer a question, whatever it is."""
    with socket.socket(fileno=fd) as connection:
        if connection.makefile("r").readline():
            connection.sendall(json.dumps(said).encode() + b"\n")


def main() -> None:
    """Be what the interpreter was called for."""
    end_with_parent()
    size, _, module, *arguments = sys.argv[1:]
    programs: Programs = {
        "ndif.runtime": lambda fd: Model(fd, int(size)).be(),
        "ndif.runtime.measure": lambda fd: evaluate(fd, int(size)),
        "ndif.runtime.weights.outline": outline,
    }
    if OPTION in arguments:
        ForkServer(Channel(socket.socket(fileno=int(arguments[0]))), programs).serve()
    elif module == "ndif.runtime.weights.fetch":
        fetch()
    elif module in programs:
        programs[module](int(arguments[0]))
    else:
        raise SystemExit(f"there is no {module} here")


if __name__ == "__main__":
    main()
