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
"""Headroom for tasks that the user's other processes start while a runner waits for its request."""

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
        memory_bytes: Bytes beyond the process's current memory; None leaves memory to the resource
            watchdog, as on a GPU, whose driver maps large ranges.
        result_bytes: Size of the largest file that the process may write within `result_file_allowed`;
            outside it, the process may write none.
        beside_a_driver: Leave room for the descriptors of a GPU's driver that has already started.
    """
    for limit in _ZERO_LIMITS:
        resource.setrlimit(limit, (0, 0))
    descriptors = _MAX_DESCRIPTORS
    if beside_a_driver:
        descriptors += max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (_MAX_DESCRIPTORS, _MAX_DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, result_bytes))
    if memory_bytes is not None:
        limit_memory(memory_bytes)


def limit_memory(extra_bytes: int) -> None:
    """Limit this process permanently to its current memory plus `extra_bytes`."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = _writable_bytes() + extra_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def limit_tasks(max_threads: int) -> None:
    """Bound the threads that a thread bomb can start between two checks of the resource watchdog.

    The kernel counts all tasks of this user, but not root's. Other tasks come and go while this process
    waits for its request, and tasks of another container may be invisible. If invisible tasks already
    exceed the bound, the limit stays as it was, and only the watchdog's count per process holds.

    Call before Landlock is enforced, because this reads /proc of other processes.
    """
    if os.getuid() == _ROOT:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = _count_user_tasks() + max_threads + _OTHER_PROCESSES_MARGIN
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
    try:
        # Probe with a process, because a thread that just ended may remain for a moment, unconfined.
        probe = os.fork()
    except BlockingIOError:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
        return
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


@contextlib.contextmanager
def result_file_allowed() -> Iterator[None]:
    """Let this process write to the result file from the host while the context lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def limited_memory(extra_bytes: int) -> Iterator[None]:
    """Limit this process to its current memory plus `extra_bytes` while the context lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _writable_bytes() + extra_bytes
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _writable_bytes() -> int:
    """Return the private writable memory of this process, as RLIMIT_DATA counts it."""
    fields = _status(Path("/proc/self"))
    if "VmData" not in fields:
        raise OSError("/proc/self/status does not state the memory of this process")
    return int(fields["VmData"].split()[0]) * _KIB


def _count_user_tasks() -> int:
    return sum(_threads(process) for process in Path("/proc").iterdir() if process.name.isdigit())


def _threads(process: Path) -> int:
    try:
        fields = _status(process)
    except OSError:
        return 0
    is_of_this_user = fields["Uid"].split()[0] == str(os.getuid())
    return int(fields["Threads"]) if is_of_this_user else 0


def _status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES_V3 = 0x20080522
_READ_SEARCH = 1 << 2
"""CAP_DAC_READ_SEARCH, by which root reads files of other users."""
libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


_Data = ctypes.c_uint32 * 6
"""The effective, permitted and inheritable sets, two 32-bit words each."""


def drop_privileges(*, keeps_reading: bool = False) -> None:
    """Drop all capabilities permanently, and make this process unreadable for other processes.

    With `keeps_reading`, root can still read files of other users.
    """
    if keeps_reading:
        keep_reading()
    else:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        _set_capabilities(_Data())
    prctl(_PR_SET_DUMPABLE, 0)
    # Set again, because a change of capabilities may have reset the signal on the parent's death.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_reading() -> None:
    """Drop this thread's capabilities permanently, except CAP_DAC_READ_SEARCH, if it has that."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    effective, permitted, *_ = _capabilities()
    _set_capabilities(_Data(effective & _READ_SEARCH, permitted & _READ_SEARCH))


@contextlib.contextmanager
def without_capabilities() -> Iterator[None]:
    """Suspend this thread's capabilities, so that descriptors opened in the context carry none."""
    before = _capabilities()
    none = _Data(*before)
    none[0] = none[3] = 0
    _set_capabilities(none)
    try:
        yield
    finally:
        _set_capabilities(before)


def _capabilities() -> ctypes.Array[ctypes.c_uint32]:
    sets = _Data()
    check(libc.capget(ctypes.byref(_Header(_CAPABILITIES_V3, 0)), sets), "capget")
    return sets


def _set_capabilities(sets: ctypes.Array[ctypes.c_uint32]) -> None:
    check(libc.capset(ctypes.byref(_Header(_CAPABILITIES_V3, 0)), sets), "capset")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    check(libc.prctl(option, value, 0, 0, 0), "prctl")


def check(result: int, call: str) -> None:
    """Raise OSError if the result of a C library call is not 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
