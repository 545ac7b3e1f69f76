"""Parent of a service's program: `python -m ndif.launch.services.reaper PARENT_PIPE GRACE_S PROGRAM...`.

Redis, MinIO and Ray know nothing of the pipe by which the processes of a server learn that their owner
stops them or is gone, and the signal that the kernel sends on a parent's death reaches only a direct child:
Ray starts a dozen further processes. This process therefore reads the pipe for the program, stops the
program with SIGTERM and, after GRACE_S seconds, SIGKILL, and then stops whatever the program leaves behind.
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
_ORPHAN_GRACE_S = 3.0
"""Seconds that processes which the program left behind have after SIGTERM, and again after SIGKILL."""

_libc = ctypes.CDLL(None)


def main() -> int:
    """Run the program, and return its exit status once it and all its descendants have ended."""
    parent_pipe, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    # Descendants whose parent ends become children of this process, which can then find and stop them.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signals, signal_writer = os.pipe()
    os.set_blocking(signal_writer, False)
    signal.set_wakeup_fd(signal_writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    try:
        program = subprocess.Popen(  # noqa: S603 - an operator's own program
            command,
            # The program also ends if this process is killed. No thread exists that a fork could harm.
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            start_new_session=True,
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127
    while program.poll() is None:
        readable, _, _ = select.select([parent_pipe, signals], [], [])
        if parent_pipe in readable or _is_stop_signal(signals):
            _stop(program, grace_s)
        else:
            _reap(program.pid)
    _stop_orphans()
    return program.returncode


def _is_stop_signal(signals: int) -> bool:
    return any(number != signal.SIGCHLD for number in os.read(signals, 1024))


def _stop(program: subprocess.Popen[bytes], grace_s: float) -> None:
    program.terminate()
    try:
        program.wait(grace_s)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def _stop_orphans() -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _ORPHAN_GRACE_S
        signalled: set[int] = set()
        while orphans := _children():
            for pid in set(orphans) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled.update(orphans)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
            _reap()


def _reap(program: int = 0) -> None:
    """Collect the status of ended children, except the program, whose status `subprocess` collects."""
    for pid in _children():
        if pid != program:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    own = str(os.getpid())
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if entry.read_text().rpartition(")")[2].split()[1] == own:
                found.append(int(entry.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
