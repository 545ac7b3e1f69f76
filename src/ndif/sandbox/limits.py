"""What a confined process may take of the machine (setrlimit(2))."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_FILES = 256
_KIB = 1024
_ROOT = 0
_TASKS_OF_OTHERS = 8192
"""By how many tasks the other processes of this user may grow while a runner waits."""

_NONE = (
    resource.RLIMIT_CORE,
    resource.RLIMIT_MSGQUEUE,
    resource.RLIMIT_NICE,
    resource.RLIMIT_RTPRIO,
    resource.RLIMIT_MEMLOCK,
)


def restrict(memory_bytes: int | None, result_bytes: int, *, beside_a_driver: bool = False) -> None:
    """Limit the memory, files and descriptors of this process from here on.

    Args:
        memory_bytes: Bytes beyond those that it holds now; None leaves memory to whoever watches the
            process, as where a GPU's driver maps what it likes.
        result_bytes: Size of the largest file that `permit_file` lets it write; until then, 0.
        beside_a_driver: Leave a GPU's driver, which has started, the descriptors that it holds.
    """
    for limit in _NONE:
        resource.setrlimit(limit, (0, 0))
    descriptors = _FILES + (_highest_descriptor() if beside_a_driver else 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (_FILES, _FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, result_bytes))
    if memory_bytes is not None:
        most = _writable_bytes() + memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def restrict_tasks(max_threads: int) -> None:
    """Limit the threads of this process, where the kernel counts any of its user.

    Reads /proc of other processes, so it comes before Landlock.
    """
    if os.getuid() != _ROOT:
        _limit_tasks(max_threads)


def permit_file() -> None:
    """Let this process write to the file that it was handed."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _highest_descriptor() -> int:
    return max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())


def _writable_bytes() -> int:
    """Private writable memory, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * _KIB
    raise OSError("/proc/self/status does not tell the memory of this process")


def _limit_tasks(max_threads: int) -> None:
    """Bound what a bomb of threads can do between two looks of the watcher, who counts them one by one.

    The kernel counts all tasks of this user, of which others come and go while this process waits for its
    request, and some may be out of sight: of another container, say. Where those are too many for any
    bound by what is in sight, there is none but the watcher's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = _tasks_of_this_user() + max_threads + _TASKS_OF_OTHERS
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, hard))
    try:
        # A process: of a thread something may be left for a moment that would not be confined.
        probe = os.fork()
    except BlockingIOError:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
        return
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _tasks_of_this_user() -> int:
    """Threads of every process of this user that is in sight."""
    return sum(_threads(process) for process in Path("/proc").iterdir() if process.name.isdigit())


def _threads(process: Path) -> int:
    try:
        status = (process / "status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    mine = fields["Uid"].split()[0] == str(os.getuid())
    return int(fields["Threads"]) if mine else 0
