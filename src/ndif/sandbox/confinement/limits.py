"""Resource limits and privileges of a confined process (setrlimit(2), capabilities(7), prctl(2))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

_MAX_DESCRIPTORS = 256
_KIB = 1024
_ROOT = 0
_OTHER_PROCESSES_MARGIN = 8192
"""Tasks that other processes of this user may start while a runner waits for its request."""

_ZERO_LIMITS = (
    resource.RLIMIT_CORE,
    resource.RLIMIT_MSGQUEUE,
    resource.RLIMIT_NICE,
    resource.RLIMIT_RTPRIO,
    resource.RLIMIT_MEMLOCK,
)


def apply_limits(
    memory_bytes: int | None, result_bytes: int, *, beside_a_driver: bool = False
) -> None:
    """Limit the memory, files and descriptors of this process from here on.

    Args:
        memory_bytes: Bytes beyond those that the process holds now; None leaves memory to the resource
            watchdog, as on a GPU, whose driver maps large ranges.
        result_bytes: Size of the largest file that the process may write after `allow_result_file`; until
            then, 0.
        beside_a_driver: Keep the descriptors that a GPU's driver, already started, holds.
    """
    for limit in _ZERO_LIMITS:
        resource.setrlimit(limit, (0, 0))
    descriptors = _MAX_DESCRIPTORS + (_highest_descriptor() if beside_a_driver else 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (_MAX_DESCRIPTORS, _MAX_DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, result_bytes))
    if memory_bytes is not None:
        most = _writable_bytes() + memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def limit_tasks(max_threads: int) -> None:
    """Bound the threads that a thread bomb can start between two checks of the resource watchdog.

    The kernel counts all tasks of this user. Other tasks come and go while this process waits for its
    request, and some may be invisible, as those of another container. If they exceed any bound by the
    visible ones, the limit stays as it was, and the watchdog's count per process is the only bound. The
    kernel does not count root's tasks. Call before Landlock is enforced: this reads /proc of other
    processes.
    """
    if os.getuid() == _ROOT:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = _count_user_tasks() + max_threads + _OTHER_PROCESSES_MARGIN
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, hard))
    try:
        # The probe is a process: a thread that just ended may remain for a moment, unconfined.
        probe = os.fork()
    except BlockingIOError:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
        return
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def allow_result_file() -> None:
    """Let this process write to the result file that the host passed to it."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _highest_descriptor() -> int:
    return max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())


def _writable_bytes() -> int:
    """Return the private writable memory of this process, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * _KIB
    raise OSError("/proc/self/status does not state the memory of this process")


def _count_user_tasks() -> int:
    """Return the number of threads of all visible processes of this user."""
    return sum(_threads(process) for process in Path("/proc").iterdir() if process.name.isdigit())


def _threads(process: Path) -> int:
    try:
        status = (process / "status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    is_of_this_user = fields["Uid"].split()[0] == str(os.getuid())
    return int(fields["Threads"]) if is_of_this_user else 0


_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES_V3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


_Data = ctypes.c_uint32 * 6
"""The effective, permitted and inheritable sets, two 32-bit words each."""


def drop_privileges() -> None:
    """Drop all capabilities for good, and make this process unreadable for other processes.

    Raises:
        OSError: If the kernel refuses.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if _libc.capset(ctypes.byref(_Header(_CAPABILITIES_V3, 0)), _Data()) != 0:
        raise _error("capset")
    _prctl(_PR_SET_DUMPABLE, 0)
    # A change of capabilities may have reset the signal that follows the parent's death.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def without_capabilities() -> Iterator[None]:
    """Suspend this thread's capabilities: a descriptor keeps those with which it was opened.

    Raises:
        OSError: If the kernel refuses.
    """
    header, before = _Header(_CAPABILITIES_V3, 0), _Data()
    if _libc.capget(ctypes.byref(header), before) != 0:
        raise _error("capget")
    none = _Data(*before)
    none[0] = none[3] = 0
    if _libc.capset(ctypes.byref(header), none) != 0:
        raise _error("capset")
    try:
        yield
    finally:
        if _libc.capset(ctypes.byref(header), before) != 0:
            raise _error("capset")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise _error("prctl")


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
