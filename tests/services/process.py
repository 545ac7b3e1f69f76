"""A service's process: on a port that stays its own, ended and started again, and gone when we are."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tests.waiting import until

HOST = "127.0.0.1"
_ENDS_S = 30.0
"""Seconds that a service may take to end before it is killed."""
# Below the range from which the kernel gives ports to clients: one of those must not take a service's
# port while the service is away.
_PORTS = range(20_000, 32_000)


# The kernel ends a child with the thread that started it, so that must be one that stays to the end.
_starter = ThreadPoolExecutor(1, "services")


def free_port() -> int:
    """A port that nothing listens on, for a service that may come and go."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port


def accepts(port: int) -> bool:
    """Return True if something listens there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


class Process:
    """A program that serves until it is stopped."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        ready: Callable[[], bool],
        *,
        cwd: Path,
        user: str | None = None,
        stopped_by: signal.Signals = signal.SIGTERM,
    ) -> None:
        """`user` runs the command, if we are root."""
        self._command = command
        self._user = user if os.geteuid() == 0 else None
        self._stopped_by = stopped_by
        self._log = log
        self._ready = ready
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """True if it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the process, while it is not known to have ended."""
        return self._process.pid if self._process is not None else None

    def launch(self) -> None:
        """Start it, and do not wait for it."""
        assert not self.running
        with self._log.open("ab") as log:
            starting = _starter.submit(_dies_with_us, self._command, log, self._cwd, self._user)
            self._process = starting.result()

    def wait(self) -> None:
        """Return once it serves."""

        def serves() -> bool:
            if self._ready():
                return True
            assert self.running, f"{self._command[0]} ended:\n{self.log()}"
            return False

        until(serves, lambda: f"{self._command[0]} does not serve:\n{self.log()}")

    def start(self) -> None:
        """Start it, and return once it serves."""
        self.launch()
        self.wait()

    def stop(self) -> None:
        """End it as an operator does; nothing if it has ended."""
        self._end(self._stopped_by)

    def kill(self) -> None:
        """End it as a power cut does."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop the process: it is there and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """The end of what it said."""
        return self._log.read_text(errors="replace")[-4000:]

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        self._process.send_signal(signal.SIGCONT)  # one that is paused would not hear it
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _dies_with_us(
    command: Sequence[str], log: IO[bytes], cwd: Path, user: str | None
) -> subprocess.Popen[bytes]:
    """A child that the kernel ends if this process is killed before it could."""
    become = [] if user is None else [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return subprocess.Popen(
        ["setpriv", *become, "--pdeathsig", "KILL", *command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Ctrl-C in the terminal is for the tests, which then end it.
        start_new_session=True,
    )
