"""Flame graphs of the servers of a benchmark, drawn by py-spy from outside.

Profiling slows the server down: figures of a run with profiles are not comparable with others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PY_SPY = str(Path(sys.executable).with_name("py-spy"))
_ATTACHED_S, _WRITTEN_S = 30.0, 60.0


class _Graphs:
    """The graphs to draw, one for each server of a scenario."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.of_scenario("server")

    def of_scenario(self, name: str) -> None:
        self._name, self._numbers = name, itertools.count(1)

    def next(self) -> Path:
        """Return the path of the next graph, where no file exists yet."""
        file = self._folder / f"{self._name}-{next(self._numbers)}.svg"
        file.unlink(missing_ok=True)
        return file


_open: list[_Graphs] = []


@contextlib.contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Draw each server that starts within the context, as `SCENARIO-N.svg` in a folder."""
    _open.append(_Graphs(folder))
    try:
        yield
    finally:
        _open.pop()


def of_scenario(name: str) -> None:
    """Name the next graphs after a scenario."""
    for graphs in _open:
        graphs.of_scenario(name)


@contextlib.contextmanager
def drawn(pid: int) -> Iterator[None]:
    """Draw a server that is ready, and its descendants, within a context of `profiled`.

    Raises:
        RuntimeError: If py-spy cannot attach to the server; the message is its output.
    """
    if not _open:
        yield
        return
    graph = _open[-1].next()
    command = [_PY_SPY, "record", "--subprocesses", "--pid", str(pid), "--output", str(graph)]
    with tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

        def output_text() -> str:
            return os.pread(output.fileno(), 1 << 20, 0).decode()

        try:
            deadline = time.monotonic() + _ATTACHED_S
            while "Sampling process" not in output_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"py-spy cannot draw process {pid}:\n{output_text()}")
                time.sleep(0.02)
            yield
        finally:
            process.send_signal(signal.SIGINT)  # py-spy then writes the graph
            process.wait(_WRITTEN_S)
        if not graph.exists():
            print(f"py-spy has seen process {pid} do nothing:\n{output_text()}", file=sys.stderr)
