"""Child processes: how they are forked, end with their parent, and are reaped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "/proc/self/oom_score_adj"


def end_with_parent() -> None:
    """Make the kernel end this process when the process that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_orphan(connection: socket.socket) -> bool:
    """Return True if the peer has closed the connection, perhaps before `end_with_parent` took effect."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def end_with_input(discard: Callable[[], None]) -> None:
    """End this process when its standard input is closed, right after `discard`.

    The host closes it, or the kernel when the host ends for any reason.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        discard()
        os._exit(1)

    threading.Thread(target=watch, name="end with input", daemon=True).start()


def fork(run: Callable[[], int | None]) -> int:
    """Fork a child that calls `run` and ends with this process; return its process id.

    The child exits with the code that `run` returns, 0 for None, and never returns from this function.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_child(parent, run)
    return pid


def _run_child(parent: int, run: Callable[[], int | None]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        if os.getppid() == parent:  # else the parent ended before prctl took effect
            code = run() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wake_for_children() -> tuple[socket.socket, socket.socket]:
    """Return a socket that becomes readable when a child ends, and its other end, which must stay open."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake, woken


def ended_children() -> Iterator[tuple[int, int]]:
    """Reap the children that have ended; yield the process id and exit code of each."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(status)


class FirstToBeKilled:
    """A context whose forks are the first processes that the kernel kills when memory runs out.

    The file in /proc is opened on creation, because a confined process cannot open it later.
    """

    def __init__(self) -> None:
        self._file = os.open(_OOM_SCORE, os.O_RDWR | os.O_CLOEXEC)
        self._own = os.pread(self._file, 16, 0)

    def __enter__(self) -> None:
        os.pwrite(self._file, b"1000", 0)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the kernel may refuse to lower the score
            os.pwrite(self._file, self._own, 0)
