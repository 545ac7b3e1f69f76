"""Runs a service's program: `python -m ndif.services.guard LIFELINE GRACE_S PROGRAM ARGUMENT...`.

The program knows no lifeline; this process does, and ends the program and all that it has started when it
is told to, or whoever started it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.05
_LEAVE_S = 3.0
"""How long what the program leaves behind may take to end."""

_libc = ctypes.CDLL(None)


def main() -> int:
    """Run it, and return its exit status once nothing of it is left."""
    lifeline, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    # Those whose parent ends become children of this process, which can tell and end them.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    waking, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    try:
        program = subprocess.Popen(  # noqa: S603 - an operator's own program
            command,
            # Of a guard that is killed nothing is left either. There are no threads that a fork could harm.
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            start_new_session=True,
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127
    while program.poll() is None:
        heard, _, _ = select.select([lifeline, waking], [], [])
        if lifeline in heard or _told_to_end(waking):
            _end(program, grace_s)
        else:
            _reap(program.pid)
    _end_what_is_left()
    return program.returncode


def _told_to_end(waking: int) -> bool:
    return any(number != signal.SIGCHLD for number in os.read(waking, 1024))


def _end(program: subprocess.Popen[bytes], grace_s: float) -> None:
    program.terminate()
    try:
        program.wait(grace_s)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def _end_what_is_left() -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _LEAVE_S
        told: set[int] = set()
        while left := _children():
            for pid in set(left) - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            told.update(left)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
            _reap()


def _reap(but: int = 0) -> None:
    """Take note of those that have ended; of `but`, the program, that is for `subprocess` to do."""
    for pid in _children():
        if pid != but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    ours = str(os.getpid())
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if entry.read_text().rpartition(")")[2].split()[1] == ours:
                found.append(int(entry.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
