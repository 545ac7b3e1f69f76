"""A runtime without models, to measure the rest of a server."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ndif.host.runtimes import Runtime, Runtimes

_PROGRAM = Path(__file__).with_name("process.py")


def noop_runtime(folder: Path, generation: str = "0.8", size_bytes: int = 1 << 30) -> Runtime:
    """Return a runtime whose interpreter is written to `folder`; its models take `size_bytes` each."""
    interpreter = folder / f"noop-{generation}-{size_bytes}"
    command = shlex.join([sys.executable, str(_PROGRAM), str(size_bytes)])
    interpreter.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    interpreter.chmod(0o755)
    return Runtime(generation, f"{generation}.0", interpreter, ())


class NoopRuntimes(Runtimes):
    """A set of one runtime, whose models do nothing."""

    def __init__(self, folder: Path, size_bytes: int = 1 << 30) -> None:
        super().__init__(folder)
        self._runtime = noop_runtime(folder, size_bytes=size_bytes)

    def installed(self) -> dict[str, Runtime]:
        """Return the one runtime."""
        return {self._runtime.generation: self._runtime}
