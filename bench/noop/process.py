"""What a host starts in place of a model process: it answers every frame at once, and imports no torch.

Usage: process.py BYTES -m MODULE ARGUMENTS..., as an interpreter is called, for the modules that a host
starts: ndif.runtime, ndif.runtime.fetch and ndif.runtime.evaluate. A runner is a thread: it has no process
to be killed, and ends when its host closes its channel.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zstandard

from ndif.runtime.frames import Channel, Header
from ndif.runtime.zygote import end_with_parent
from ndif.schema import torch_format

RESULT = torch_format.dumps({})
COMPRESSED = zstandard.ZstdCompressor().compress(RESULT)
_LOOK_S = 0.01
META = {"execution_time": 0.0, "peak_memory": 0}


class Control:
    """The channel to the host, which every runner writes to."""

    def __init__(self, channel: Channel) -> None:
        self.receive = channel.receive
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, header: Header) -> None:
        """Write one frame whole."""
        with self._lock:
            self._channel.send(header)


def be_model(fd: int, size: int) -> None:
    """Be a zygote until the host hangs up."""
    control = Control(Channel(socket.socket(fileno=fd)))
    try:
        while True:
            header, _, fds = control.receive()
            match header["kind"]:
                case "load":
                    control.send(ready(header["spec"], size))
                case "fork":
                    arguments = (control, header["runner"], fds[0])
                    threading.Thread(target=be_runner, args=arguments, daemon=True).start()
                case "verify":
                    control.send({"kind": "verified", "restored": 0})
    except (EOFError, OSError):
        return


def ready(spec: Mapping[str, Any], size: int) -> Header:
    """What a process says that has loaded its model."""
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


def be_runner(control: Control, name: str, fd: int) -> None:
    """Answer requests until the host closes the channel."""
    with socket.socket(fileno=fd) as connection:
        channel = Channel(connection)
        try:
            channel.send({"kind": "idle"})
            while True:
                header, payload, _ = channel.receive()
                channel.send({"kind": "running"})
                if payload[:1] == b"{":
                    wait(**json.loads(payload))
                compressed = header["compress_inline"]
                content = COMPRESSED if compressed else RESULT
                channel.send({"kind": "result", "compressed": compressed, "meta": META}, content)
        except (EOFError, OSError):
            pass
    control.send({"kind": "exited", "runner": name, "code": 0})


def wait(tell: str) -> None:
    """What a payload can ask for: be busy for as long as a file is there, which names this process."""
    Path(tell).write_text(str(os.getpid()))
    while Path(tell).exists():
        time.sleep(_LOOK_S)


def fetch() -> None:
    """Nothing is to be had."""
    print(json.dumps({"repo_id": None, "task": None}), flush=True)


def evaluate(size: int) -> None:
    """Every model is as large."""
    for line in sys.stdin:
        question = json.loads(line)
        task = question["spec"]["task"] or "text-generation"
        answer = {
            "number": question["number"],
            "bytes": size,
            "parameters": size // 2,
            "task": task,
        }
        print(json.dumps({**answer, "repo_id": None, "config": None}), flush=True)


def main() -> None:
    """Be what the interpreter was called for."""
    end_with_parent()
    size, _, module, *arguments = sys.argv[1:]
    match module:
        case "ndif.runtime":
            be_model(int(arguments[0]), int(size))
        case "ndif.runtime.fetch":
            fetch()
        case "ndif.runtime.evaluate":
            evaluate(int(size))
        case _:
            raise SystemExit(f"there is no {module} here")


if __name__ == "__main__":
    main()
