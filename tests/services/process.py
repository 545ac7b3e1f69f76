"""A service's process: it keeps its port over restarts, and ends with the tests."""

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
"""Seconds before a service that does not end is killed."""
# Below the kernel's range of client ports: a client must not take a service's port while the service is
# stopped.
_PORTS = range(20_000, 32_000)


# The kernel ends a child with the thread that started it, so this thread must live until the end.
_starter = ThreadPoolExecutor(1, "services")


def free_port() -> int:
    """Return a port that nothing listens on, for a service that may be restarted."""
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
    """Return True if something listens on a port."""
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
        """Set the program up; `user` runs the command, if the tests run as root."""
        self._command = command
        self._user = user if os.geteuid() == 0 else None
        self._stopped_by = stopped_by
        self._log = log
        self._ready = ready
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """True if the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id, until the process has been ended."""
        return self._process.pid if self._process is not None else None

    def launch(self) -> None:
        """Start the process without waiting for it."""
        assert not self.running
        with self._log.open("ab") as log:
            starting = _starter.submit(_dies_with_us, self._command, log, self._cwd, self._user)
            self._process = starting.result()

    def wait(self) -> None:
        """Return once the service answers."""

        def serves() -> bool:
            if self._ready():
                return True
            assert self.running, f"{self._command[0]} ended:\n{self.log()}"
            return False

        until(serves, lambda: f"{self._command[0]} does not serve:\n{self.log()}")

    def start(self) -> None:
        """Start the process; return once the service answers."""
        self.launch()
        self.wait()

    def stop(self) -> None:
        """End the process in order; do nothing if it has ended."""
        self._end(self._stopped_by)

    def kill(self) -> None:
        """End the process like a power cut."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Pause the process: it exists but does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """Return the end of the log."""
        return self._log.read_text(errors="replace")[-4000:]

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        self._process.send_signal(signal.SIGCONT)  # a paused process would not receive it
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _dies_with_us(
    command: Sequence[str], log: IO[bytes], cwd: Path, user: str | None
) -> subprocess.Popen[bytes]:
    """Start a child that the kernel ends if this process is killed first."""
    become = [] if user is None else [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return subprocess.Popen(
        ["setpriv", *become, "--pdeathsig", "KILL", *command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Ctrl-C in the terminal goes to the tests, which then end the child.
        start_new_session=True,
    )
