"""Parent of a service's program: `python -m ndif.launch.services.reaper NAME PIPE GRACE_S PROGRAM...`.

A server's processes stop when their owner closes a pipe or ends. Redis, MinIO and Ray do not read this
pipe. The kernel's signal on a parent's death reaches only direct children, and Ray starts a dozen further
processes. Therefore this process reads the pipe for the program. It stops the program with SIGTERM and,
after GRACE_S seconds, SIGKILL, and then stops the program's orphans. NAME identifies the service in the
list of processes, for operators and for `processes_of`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.05
_ORPHAN_GRACE_S = 3.0
"""Seconds that orphans of the program have to end after SIGTERM, and again after SIGKILL."""

_libc = ctypes.CDLL(None)


def main() -> int:
    """Run the program, and return its exit status once it and all its descendants have ended."""
    parent_pipe, grace_s, command = int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    # Descendants whose parent ends become children of this process, which can then find and stop them.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Block signals until their handlers are installed.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        program = subprocess.Popen(  # noqa: S603 - an operator's own program
            command,
            preexec_fn=_prepare_program,  # no thread exists that a fork could harm
            start_new_session=True,
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127

    def stop(*_: object) -> None:
        _kill(program.pid, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, grace_s)

    signal.signal(signal.SIGALRM, lambda *_: _kill(program.pid, signal.SIGKILL))
    for number in _STOP_SIGNALS:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    threading.Thread(target=_stop_with_owner, args=(parent_pipe,), daemon=True).start()
    ended = 0
    while ended != program.pid:  # other children are processes that the program left behind
        ended, status = os.waitpid(-1, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    for number in (signal.SIGALRM, *_STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    _stop_orphans()
    return program.returncode


def _prepare_program() -> None:
    # The program also ends if this process is killed.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _stop_with_owner(parent_pipe: int) -> None:
    os.read(parent_pipe, 1)  # returns when the owner closes its end, or ends
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _stop_orphans() -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _ORPHAN_GRACE_S
        signalled: set[int] = set()
        while time.monotonic() < deadline:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            for pid in _children() - signalled:
                _kill(pid, number)
                signalled.add(pid)
            time.sleep(_POLL_S)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children() -> set[int]:
    own, pids = str(os.getpid()), set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if entry.read_text().rpartition(")")[2].split()[1] == own:
                pids.add(int(entry.parent.name))
    return pids


if __name__ == "__main__":
    sys.exit(main())
