"""A process that reports its own state, so that forked and started processes can be compared."""

from __future__ import annotations

import ctypes
import json
import locale
import os
import random
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

_PR_GET_PDEATHSIG = 2
_STATUS = (
    "Umask",
    "NoNewPrivs",
    "Seccomp",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "Groups",
)
_MASKS = ("SigBlk", "SigIgn", "SigCgt")


def answer(fd: int) -> None:
    """Answer each line that arrives on a socket; end when the socket closes."""
    from ndif.runtime.process.children import end_with_parent

    end_with_parent()
    connection = socket.socket(fileno=fd)
    for line in connection.makefile():
        question, _, argument = line.strip().partition(" ")
        result: Any = None
        if question == "exit":
            raise SystemExit(int(argument))
        if question == "print":
            print(argument, flush=True)
        if question == "state":
            result = state(fd)
        if question == "isolation":
            result = isolation()
        connection.sendall(json.dumps(result).encode() + b"\n")


def state(fd: int) -> dict[str, Any]:
    """Return everything that can differ between processes that run the same program."""
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    torch = sys.modules.get("torch")
    death_signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(death_signal))
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "death_signal": death_signal.value,
        "environment": dict(os.environ),
        "environ": sorted(Path("/proc/self/environ").read_text().strip("\0").split("\0")),
        "command": _command(fd),
        "argv": [argument for argument in sys.argv[1:] if argument != str(fd)],
        "flags": list(sys.flags),
        "path": sys.path,
        "folder": str(Path.cwd()),
        "root": str(Path("/proc/self/root").readlink()),
        "descriptors": sorted(_descriptors(fd)),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "status": {name: status[name].strip() for name in _STATUS if name in status},
        "masks": {name: status[name] for name in _MASKS},
        "handlers": {
            str(number): _name(signal.getsignal(number))
            for number in sorted(signal.valid_signals())
        },
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "cpus": sorted(os.sched_getaffinity(0)),
        "scheduler": [os.sched_getscheduler(0), os.nice(0)],
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "locale": [
            locale.setlocale(locale.LC_ALL),
            sys.getfilesystemencoding(),
            sys.stdout.encoding,
        ],
        "users": [*os.getresuid(), *os.getresgid()],
        "buffering": [sys.stdout.line_buffering, sys.stdout.write_through],
        "torch_threads": torch and [torch.get_num_threads(), torch.get_num_interop_threads()],
        "cuda": bool(torch and torch.cuda.is_initialized()),
        "imported": sorted({"torch", "transformers", "nnsight"} & {*sys.modules}),
        "random": {
            "python": random.random(),
            "numpy": float(np.random.random()),
            **({"torch": torch.initial_seed()} if torch else {}),
        },
    }


def isolation() -> list[bool]:
    """Return whether the policy and the namespaces were prepared before this process was forked."""
    namespaces = sys.modules.get("ndif.runtime.process.namespaces")
    has_made = namespaces is not None and namespaces.Namespaces.of_fork_server is not None
    return ["ndif.sandbox.protector" in sys.modules, has_made]


def _command(fd: int) -> list[str]:
    command = Path("/proc/self/cmdline").read_text().strip("\0").split("\0")
    return [argument for argument in command[-3:] if argument != str(fd)]


def _descriptors(fd: int) -> list[str]:
    """Return the names of open descriptors; `fd` is this process's channel."""
    descriptors = []
    for path in Path("/proc/self/fd").iterdir():
        name = path.name
        try:
            target = str(path.readlink())
        except FileNotFoundError:  # the listing itself
            continue
        number = "channel" if name == str(fd) else name if int(name) < 3 else "other"
        descriptors.append(f"{number} {target.partition(':')[0]}")
    return descriptors


def _name(handler: Any) -> str:
    return getattr(handler, "__name__", str(handler))
