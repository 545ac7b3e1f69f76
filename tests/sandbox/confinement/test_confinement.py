"""Attempts of a confined process: refused by each layer alone and by all, as root and as nobody.

This file, run as a program, is a launcher: it forks a process for each attempt, confines it, and runs the
attempt. Every attempt also runs unconfined, so that no test passes for another reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401 - a host name needs it, when it can no longer be read
import errno
import fcntl
import json
import mmap
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
NOBODY = 65534
MEMORY, RESULT, THREADS = 64 << 20, 100_000, 20
REFUSED = frozenset({"EPERM", "EACCES"})
SECRET = "hf_a-token-that-nobody-may-read"
PATIENCE_S = 300.0
"""Bound of each wait, in seconds. tests/waiting.py has the same, but imports more than the launcher has."""
LARGE = 1 << 31
NULL = ctypes.c_void_p(0)
INTO_NOWHERE = ctypes.c_void_p(8)
"""An unmapped address: a permitted call fails with EFAULT."""

libc = ctypes.CDLL(None, use_errno=True)
memory_of_victim = ctypes.create_string_buffer(b"what the victim holds", 32)


# Attempts.


@dataclass
class Given:
    """The files, processes and sockets of one attempt, newly made for each."""

    inside: Path
    outside: Path
    victim: int
    parent: int
    port: int
    unix: str
    abstract: str
    file: int = -1
    """The descriptor of the result file, which the host passes."""
    confinement: Any = None


Try = Callable[[Given], object]


@dataclass(frozen=True)
class Attempt:
    """An action that a confined process must not be able to do."""

    run: Try
    by: tuple[str, ...]
    """The layers that refuse it on their own."""
    tried_freely: bool
    """True if the attempt is harmless without the confinement, and then has another outcome."""
    abi: int
    """The first version of Landlock that refuses it."""


ATTEMPTS: dict[str, Attempt] = {}
STILL: dict[str, Try] = {}


def attempt(*by: str, freely: bool = True, abi: int = 1) -> Callable[[Try], Try]:
    def register(run: Try) -> Try:
        ATTEMPTS[run.__name__] = Attempt(run, by, freely, abi)
        return run

    return register


def still(run: Try) -> Try:
    """Register an action that a trace needs."""
    STILL[run.__name__] = run
    return run


class NoSuchCallError(Exception):
    """This architecture has no call of that name."""


def call(name: str, *arguments: Any) -> int:
    """Make a system call by its number, bypassing Python and the C library."""
    import pyseccomp

    number = {"fchmodat2": 452, "statmount": 457, "listmount": 458, "lsm_set_self_attr": 460}.get(
        name
    ) or pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    if number < 0:
        raise NoSuchCallError(name)
    given = (ctypes.c_long(item) if isinstance(item, int) else item for item in arguments)
    libc.syscall.restype = ctypes.c_long
    result: int = libc.syscall(ctypes.c_long(number), *given)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# Calls that no trace needs. Their arguments do no harm on a machine that permits the call: an invalid magic
# number, a closed descriptor, an unmapped address.
CALLS: dict[str, tuple[Any, ...]] = {
    # other processes
    "process_madvise": (-1, INTO_NOWHERE, 1, 0, 0),
    "process_mrelease": (-1, 0),
    "pidfd_getfd": (-1, 0, 0),
    "rt_tgsigqueueinfo": (1, 1, 0, INTO_NOWHERE),
    "sched_setattr": (0, INTO_NOWHERE, 0),
    "sched_setscheduler": (0, 0, INTO_NOWHERE),
    "sched_setparam": (0, INTO_NOWHERE),
    "ioprio_set": (99, 0, 0),
    "setpgid": (0, -1),
    "wait4": (-1, NULL, 1, NULL),
    # large interfaces of the kernel
    "io_uring_setup": (0, INTO_NOWHERE),
    "io_uring_enter": (-1, 0, 0, 0, NULL, 0),
    "io_setup": (0, INTO_NOWHERE),
    "bpf": (99, NULL, 0),
    "userfaultfd": (LARGE,),
    "memfd_secret": (0,),
    "seccomp": (99, 0, NULL),
    "landlock_restrict_self": (-1, 0),
    "lsm_set_self_attr": (0, INTO_NOWHERE, 0, 1),
    "fanotify_init": (LARGE, LARGE),
    "inotify_init1": (0,),
    "add_key": (INTO_NOWHERE, NULL, NULL, 0, 0),
    "request_key": (INTO_NOWHERE, NULL, NULL, 0),
    "keyctl": (99, 0, 0, 0, 0),
    "modify_ldt": (99, NULL, 0),
    # memory and queues that outlive a process or have names
    "shmget": (0, 0, 0),
    "shmat": (-1, NULL, 0),
    "semget": (0, 0, 0),
    "msgget": (0x7FFFFFF0, 0),
    "mq_open": (INTO_NOWHERE, 0, 0, NULL),
    "mbind": (INTO_NOWHERE, 1, 99, NULL, 0, 0),
    "migrate_pages": (0, 0, INTO_NOWHERE, INTO_NOWHERE),
    "move_pages": (0, 1, INTO_NOWHERE, NULL, INTO_NOWHERE, 99),
    "remap_file_pages": (INTO_NOWHERE, 1, 1, 0, 0),
    # mounts and the root of the file system
    "mount": (INTO_NOWHERE, INTO_NOWHERE, INTO_NOWHERE, 0, NULL),
    "umount2": (INTO_NOWHERE, 0),
    "pivot_root": (INTO_NOWHERE, INTO_NOWHERE),
    "chroot": (INTO_NOWHERE,),
    "setns": (-1, 0),
    "open_tree": (-1, INTO_NOWHERE, 0),
    "move_mount": (-1, INTO_NOWHERE, -1, INTO_NOWHERE, 0),
    "fsopen": (INTO_NOWHERE, 0),
    "fsmount": (-1, 0, 0),
    "fspick": (-1, INTO_NOWHERE, 0),
    "mount_setattr": (-1, INTO_NOWHERE, 0, INTO_NOWHERE, 0),
    "statmount": (INTO_NOWHERE, INTO_NOWHERE, 0, 0),
    "listmount": (INTO_NOWHERE, INTO_NOWHERE, 0, 0),
    "open_by_handle_at": (-1, INTO_NOWHERE, 0),
    "name_to_handle_at": (-1, INTO_NOWHERE, INTO_NOWHERE, INTO_NOWHERE, 0),
    "chdir": (INTO_NOWHERE,),
    "fchdir": (-1,),
    "quotactl": (LARGE, NULL, 0, NULL),
    "swapon": (INTO_NOWHERE, 0),
    "swapoff": (INTO_NOWHERE,),
    "acct": (INTO_NOWHERE,),
    # files, by descriptors and paths
    "fchmod": (-1, 0),
    "fchmodat": (-1, INTO_NOWHERE, 0),
    "fchmodat2": (-1, INTO_NOWHERE, 0, 0),
    "fchown": (-1, 0, 0),
    "fchownat": (-1, INTO_NOWHERE, 0, 0, 0),
    "setxattr": (INTO_NOWHERE, INTO_NOWHERE, NULL, 0, 0),
    "fsetxattr": (-1, INTO_NOWHERE, NULL, 0, 0),
    "getxattr": (INTO_NOWHERE, INTO_NOWHERE, NULL, 0),
    "removexattr": (INTO_NOWHERE, INTO_NOWHERE),
    "utimensat": (-1, INTO_NOWHERE, NULL, 0),
    "ftruncate": (-1, 0),
    "fallocate": (-1, 0, 0, 0),
    "linkat": (-1, INTO_NOWHERE, -1, INTO_NOWHERE, 0),
    "symlinkat": (INTO_NOWHERE, -1, INTO_NOWHERE),
    "unlinkat": (-1, INTO_NOWHERE, 0),
    "mkdirat": (-1, INTO_NOWHERE, 0),
    "mknodat": (-1, INTO_NOWHERE, 0o100000, 0),
    "renameat2": (-1, INTO_NOWHERE, -1, INTO_NOWHERE, 0),
    "copy_file_range": (-1, NULL, -1, NULL, 1, 0),
    "sendfile": (-1, -1, NULL, 1),
    "splice": (-1, NULL, -1, NULL, 1, 0),
    "vmsplice": (-1, INTO_NOWHERE, 1, 0),
    # identity and capabilities
    "setuid": (NOBODY,),
    "setgid": (NOBODY,),
    "setreuid": (-1, -1),
    "setregid": (-1, -1),
    "setresuid": (-1, -1, -1),
    "setresgid": (-1, -1, -1),
    "setfsuid": (NOBODY,),
    "setfsgid": (NOBODY,),
    "setgroups": (0, NULL),
    "capset": (INTO_NOWHERE, NULL),
    "personality": (0xFFFFFFFF,),
    # the machine
    "reboot": (0, 0, 0, NULL),
    "kexec_load": (0, 0, NULL, 0xFFFF),
    "kexec_file_load": (-1, -1, 0, NULL, LARGE),
    "init_module": (NULL, 0, INTO_NOWHERE),
    "finit_module": (-1, INTO_NOWHERE, 0),
    "delete_module": (INTO_NOWHERE, 0),
    "syslog": (10, NULL, 0),
    "settimeofday": (INTO_NOWHERE, NULL),
    "clock_settime": (99, INTO_NOWHERE),
    "clock_adjtime": (99, INTO_NOWHERE),
    "adjtimex": (INTO_NOWHERE,),
    "sethostname": (NULL, -1),
    "setdomainname": (NULL, -1),
    "ioperm": (1 << 20, 1, 1),
    "iopl": (99,),
    # the channel is a socket: it cannot be connected or bound to anything else
    "connect": (3, INTO_NOWHERE, 16),
    "bind": (3, INTO_NOWHERE, 16),
    "listen": (3, 1),
    "accept4": (3, NULL, NULL, 0),
    "setsockopt": (3, 1, 9999, INTO_NOWHERE, 4),
    "sendmsg": (3, INTO_NOWHERE, 0),
    "sendmmsg": (3, INTO_NOWHERE, 1, 0),
    "sendto": (3, INTO_NOWHERE, 0, 0, INTO_NOWHERE, 16),
    "socketpair": (1, 99, 0, INTO_NOWHERE),
}

OPTIONS = {
    "PR_SET_PDEATHSIG": (1, 0),
    "PR_SET_DUMPABLE": (4, 1),
    "PR_SET_KEEPCAPS": (8, 0),
    "PR_SET_TSC": (26, 99),
    "PR_SET_SECUREBITS": (28, 0),
    "PR_SET_SECCOMP": (22, 99),
    "PR_SET_MM": (35, 99, 0, 0, 1),
    "PR_SET_CHILD_SUBREAPER": (36, 1),
    "PR_SET_NO_NEW_PRIVS": (38, 1),
    "PR_CAP_AMBIENT": (47, 99),
    "PR_SET_PTRACER": (0x59616D61, 0),
}


def _register_tables() -> None:
    for name, arguments in CALLS.items():
        ATTEMPTS[name] = Attempt(
            lambda _, name=name, arguments=arguments: call(name, *arguments),  # type: ignore[misc]
            ("calls",),
            True,
            1,
        )
    for name, arguments in OPTIONS.items():
        ATTEMPTS[name] = Attempt(
            lambda _, arguments=arguments: call("prctl", *arguments, *(0,) * (5 - len(arguments))),  # type: ignore[misc]
            ("calls",),
            True,
            1,
        )


_register_tables()


# Files.


@attempt("files")
def read_outside(given: Given) -> None:
    (given.outside / "file").read_text()


@attempt("files")
def list_outside(given: Given) -> None:
    list(given.outside.iterdir())


@attempt("files")
def read_by_way_of_a_parent(given: Given) -> None:
    (given.inside / ".." / "outside" / "file").read_text()


@attempt("files")
def read_through_a_link(given: Given) -> None:
    (given.inside / "link").read_text()


@attempt("files")
def read_what_a_system_holds(_: Given) -> None:
    Path("/etc/passwd").read_text()


@attempt("files")
def read_its_own_environment(_: Given) -> None:
    Path("/proc/self/environ").read_bytes()


@attempt("files")
def read_its_own_memory(_: Given) -> None:
    Path("/proc/self/mem").open("rb").close()


@attempt("files")
def read_a_victims_environment(given: Given) -> None:
    Path(f"/proc/{given.victim}/environ").read_bytes()


@attempt("files")
def write_a_victims_memory(given: Given) -> None:
    os.close(os.open(f"/proc/{given.victim}/mem", os.O_RDWR))


@attempt("files")
def look_for_processes(_: Given) -> None:
    list(Path("/proc").iterdir())


@attempt("files")
def open_a_device(_: Given) -> None:
    os.close(os.open("/dev/zero", os.O_RDWR))


@attempt("files")
def write_what_it_may_read(given: Given) -> None:
    (given.inside / "file").open("r+").write("mine")


@attempt("files")
def write_outside(given: Given) -> None:
    (given.outside / "file").open("r+").write("mine")


@attempt("files")
def append(given: Given) -> None:
    (given.inside / "file").open("a").write("mine")


@attempt("files")
def truncate_by_opening(given: Given) -> None:
    os.close(os.open(given.inside / "file", os.O_RDONLY | os.O_TRUNC))


@attempt("files", "calls", abi=3)
def truncate(given: Given) -> None:
    os.truncate(given.inside / "file", 0)


@attempt("files")
def create(given: Given) -> None:
    (given.inside / "new").write_text("mine")


@attempt("files")
def create_without_a_name(given: Given) -> None:
    os.close(os.open(given.inside, os.O_TMPFILE | os.O_RDWR))


@attempt("files")
def create_in_shared_memory(_: Given) -> None:
    path = Path("/dev/shm") / f"ndif-test-{os.getpid()}"
    path.write_text("mine")
    path.unlink()


@attempt("files", "calls")
def make_a_folder(given: Given) -> None:
    (given.inside / "new").mkdir()


@attempt("files", "calls")
def make_a_pipe_with_a_name(given: Given) -> None:
    os.mkfifo(given.inside / "new")


@attempt("files", "calls")
def unlink(given: Given) -> None:
    (given.inside / "file").unlink()


@attempt("files", "calls")
def remove_a_folder(given: Given) -> None:
    (given.inside / "folder").rmdir()


@attempt("files", "calls")
def rename(given: Given) -> None:
    (given.inside / "file").rename(given.inside / "new")


@attempt("files", "calls")
def symlink(given: Given) -> None:
    (given.inside / "new").symlink_to("file")


@attempt("files", "calls")
def hardlink(given: Given) -> None:
    (given.inside / "new").hardlink_to(given.inside / "file")


@attempt("calls")
def chmod(given: Given) -> None:
    (given.inside / "file").chmod(0o777)


@attempt("calls")
def chown(given: Given) -> None:
    os.chown(given.inside / "file", os.getuid(), os.getgid())


@attempt("calls")
def utime(given: Given) -> None:
    os.utime(given.inside / "file", (1, 1))


# Memory outside every limit.


@attempt("calls")
def share_memory(_: Given) -> None:
    mmap.mmap(-1, mmap.PAGESIZE)


@attempt("calls")
def share_memory_by_number(_: Given) -> None:
    validated = 3  # MAP_SHARED_VALIDATE, as later kernels have it
    call("mmap", NULL, mmap.PAGESIZE, mmap.PROT_READ, validated | mmap.MAP_ANONYMOUS, -1, 0)


@still
def map_a_file(given: Given) -> None:
    with (given.inside / "file").open("rb") as file:
        mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)[:1]


# Processes.


@attempt("calls")
def fork(_: Given) -> None:
    if call("fork") == 0:
        os._exit(0)


@attempt("calls")
def fork_by_clone(_: Given) -> None:
    if call("clone", signal.SIGCHLD, NULL, NULL, NULL, 0) == 0:
        os._exit(0)


@attempt("calls")
def fork_by_the_library(_: Given) -> None:
    if os.fork() == 0:
        os._exit(0)


@attempt("calls", freely=False)  # the child would share this process's stack
def vfork(_: Given) -> None:
    call("vfork")


@attempt("calls", freely=False)
def a_process_in_its_memory(_: Given) -> None:
    call("clone", 0x100 | signal.SIGCHLD, NULL, NULL, NULL, 0)


@attempt("files", "calls")
def execute(_: Given) -> None:
    os.execv("/bin/true", ["true"])


@attempt("files", "calls")
def execute_its_interpreter(_: Given) -> None:
    os.execv(sys.executable, [sys.executable, "-Sc", "pass"])


@attempt("calls")
def execute_by_descriptor(_: Given) -> None:
    call("execveat", -1, INTO_NOWHERE, NULL, NULL, 0)


@attempt("files", "calls")
def spawn(_: Given) -> None:
    os.posix_spawn("/bin/true", ["true"], {})


@attempt("files", "calls")
def a_subprocess(_: Given) -> None:
    subprocess.run(["/bin/true"], check=True)


@attempt("calls")
def a_file_of_memory(_: Given) -> None:
    os.close(os.memfd_create("code"))


@attempt("calls")
def a_namespace(_: Given) -> None:
    call("unshare", 0x04000000)  # CLONE_NEWUTS


@attempt("calls")
def a_namespace_of_users(_: Given) -> None:
    call("unshare", 0x10000000)


@attempt("files", "calls", abi=6)
def kill_a_victim(given: Given) -> None:
    os.kill(given.victim, 0)


@attempt("files", "calls", abi=6)
def kill_its_parent(given: Given) -> None:
    os.kill(given.parent, 0)


@attempt("calls")
def kill_a_group(_: Given) -> None:
    os.kill(0, 0)


@attempt("calls", freely=False)
def kill_everybody(_: Given) -> None:
    os.kill(-1, 0)


@attempt("files", "calls", abi=6)
def kill_a_victims_thread(given: Given) -> None:
    call("tgkill", given.victim, given.victim, 0)


@attempt("files", "calls", abi=6)
def kill_a_thread_of_any_process(given: Given) -> None:
    call("tkill", given.victim, 0)


@attempt("calls")
def queue_a_signal(given: Given) -> None:
    call("rt_sigqueueinfo", given.victim, 0, INTO_NOWHERE)


@attempt("calls")
def open_a_process(given: Given) -> None:
    os.close(os.pidfd_open(given.victim))


@attempt("files", "calls", abi=6)
def kill_by_descriptor(given: Given) -> None:
    signal.pidfd_send_signal(os.pidfd_open(given.victim), 0)


@attempt("calls")
def kill_by_no_descriptor(_: Given) -> None:
    call("pidfd_send_signal", -1, 0, NULL, 0)


@attempt("files", "calls")
def trace(given: Given) -> None:
    call("ptrace", 0x4206, given.victim, NULL, NULL)  # PTRACE_SEIZE


@attempt("calls")
def be_traced(_: Given) -> None:
    call("ptrace", 0, 0, NULL, NULL)


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _vectors() -> tuple[Any, Any, ctypes.Array[ctypes.c_char]]:
    mine = ctypes.create_string_buffer(32)
    local = _Vector(ctypes.addressof(mine), 32)
    remote = _Vector(ctypes.addressof(memory_of_victim), 32)
    return local, remote, mine


@attempt("files", "calls")
def read_a_victims_memory(given: Given) -> None:
    local, remote, mine = _vectors()
    call("process_vm_readv", given.victim, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    assert mine.value == memory_of_victim.value


@attempt("files", "calls")
def write_a_victims_memory_by_call(given: Given) -> None:
    local, remote, mine = _vectors()
    mine.value = memory_of_victim.value
    call("process_vm_writev", given.victim, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)


@attempt("files", "calls")
def compare_with_a_victim(given: Given) -> None:
    call("kcmp", given.parent, given.victim, 1, 0, 0)


@attempt("calls")
def limit_a_victim(given: Given) -> None:
    resource.prlimit(given.victim, resource.RLIMIT_CORE)


@attempt("calls")
def move_to_other_cores(_: Given) -> None:
    os.sched_setaffinity(0, os.sched_getaffinity(0))


@attempt("calls")
def be_first(_: Given) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))


@attempt("calls")
def measure(_: Given) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 112, 0), 112)
    call("perf_event_open", ctypes.byref(attributes), 0, -1, -1, 0)


@attempt("calls")
def own_a_descriptor(given: Given) -> None:
    fcntl.fcntl(3, fcntl.F_SETOWN, given.victim)


@attempt("calls")
def choose_a_descriptors_signal(_: Given) -> None:
    fcntl.fcntl(3, fcntl.F_SETSIG, signal.SIGUSR1)


@attempt("calls")
def own_a_descriptor_by_ioctl(given: Given) -> None:
    fcntl.ioctl(3, 0x8901, struct.pack("i", given.victim))  # FIOSETOWN


@attempt("calls")
def own_a_socket_by_ioctl(given: Given) -> None:
    fcntl.ioctl(3, 0x8902, struct.pack("i", given.victim))  # SIOCSPGRP


@attempt("calls")
def type_into_a_terminal(_: Given) -> None:
    fcntl.ioctl(3, 0x5412, b"x")  # TIOCSTI


@attempt("calls")
def be_signalled_for_a_descriptor(_: Given) -> None:
    fcntl.ioctl(3, 0x5452, struct.pack("i", 0))  # FIOASYNC


# The network.


@attempt("calls")
def a_socket_of_any_family(_: Given) -> object:
    outcomes = set()
    for family in range(46):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            try:
                os.close(call("socket", family, kind, 0))
                outcomes.add("ok")
            except OSError as error:
                outcomes.add(errno.errorcode[error.errno or 0])
    return outcomes.pop() if len(outcomes) == 1 else sorted(outcomes)


@attempt("files", "calls", abi=4)
def connect_tcp(given: Given) -> None:
    socket.create_connection(("127.0.0.1", given.port), 2).close()


@attempt("files", "calls", abi=4)
def listen_tcp(_: Given) -> None:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))


@attempt("calls")
def send_udp(given: Given) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.sendto(b"out", ("127.0.0.1", given.port))


@attempt("calls")
def connect_unix(given: Given) -> None:
    with socket.socket(socket.AF_UNIX) as mine:
        mine.connect(given.unix)


@attempt("files", "calls", abi=6)
def connect_abstract(given: Given) -> None:
    with socket.socket(socket.AF_UNIX) as mine:
        mine.connect(given.abstract)


@attempt("calls")
def find_a_name(_: Given) -> None:
    # netlink, with which the C library queries this machine's addresses
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()


# Actions that a trace needs.


@still
def read_inside(given: Given) -> None:
    assert (given.inside / "file").read_text() == "within"
    assert sorted(file.name for file in given.inside.iterdir()) == ["file", "folder", "link"]


@still
def read_what_libraries_ask_the_system(_: Given) -> None:
    Path("/proc/meminfo").read_text()
    Path("/proc/cpuinfo").read_text()
    with Path("/dev/urandom").open("rb", buffering=0) as random:
        assert len(random.read(8)) == 8
    Path("/dev/null").write_text("away")


@still
def threads_and_locks(_: Given) -> None:
    condition, threads = threading.Condition(), []

    def run() -> None:
        with condition:
            threads.append(threading.get_native_id())
            condition.notify()

    thread = threading.Thread(target=run, name="named")
    with condition:
        thread.start()
        assert condition.wait(PATIENCE_S)
    thread.join()
    assert threads != [threading.get_native_id()]


@still
def signals_of_its_own(_: Given) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2


@still
def pipes_and_waiting(_: Given) -> None:
    reading, writing = os.pipe()
    with select.epoll() as poll:
        poll.register(reading, select.EPOLLIN)
        os.write(writing, b"x")
        assert poll.poll(PATIENCE_S) == [(reading, select.EPOLLIN)]
    assert select.select([reading], [], [], PATIENCE_S)[0] == [reading]
    os.set_blocking(reading, False)
    os.dup2(reading, os.dup(writing))


@still
def memory(_: Given) -> None:
    with mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area.madvise(mmap.MADV_DONTNEED)
    assert len(bytearray(MEMORY // 2)) == MEMORY // 2


@still
def its_own_limits(_: Given) -> None:
    resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))


# Observations.


def allocate(_: Given) -> None:
    bytearray(2 * MEMORY)


def allocate_a_mapping(_: Given) -> None:
    mmap.mmap(-1, 2 * MEMORY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def allocate_little_by_little(_: Given) -> None:
    held = []
    while len(held) << 20 < 2 * MEMORY:
        held.append(bytearray(1 << 20))


def write_too_early(given: Given) -> None:
    os.write(given.file, b"x")


def write_the_result(given: Given) -> None:
    with given.confinement.result_file_allowed():
        assert os.write(given.file, bytes(RESULT)) == RESULT
        os.pwrite(given.file, b"again", 0)
        os.write(given.file, b"x")


def open_many(_: Given) -> object:
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)
    return max(os.dup2(3, number) for number in range(5, 256))


def raise_limits(_: Given) -> object:
    outcomes = {}
    for name in ("RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_MEMLOCK"):
        number = getattr(resource, name)
        most = resource.getrlimit(number)[1]
        try:
            resource.setrlimit(number, (most, most + 1))
        except (OSError, ValueError) as error:
            outcomes[name] = type(error).__name__
    return outcomes


def look_at_itself(_: Given) -> object:
    open_ones = {}
    for number in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        with contextlib.suppress(OSError):
            open_ones[number] = fcntl.fcntl(number, fcntl.F_GETFD)
    return {
        "descriptors": open_ones,
        "environment": dict(os.environ),
        "pid": os.getpid(),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "streams": [
            os.fstat(stream).st_rdev == Path("/dev/null").stat().st_rdev for stream in range(3)
        ],
    }


def look_for_the_secret(_: Given) -> object:
    """Look at the stack, where the kernel put the environment."""
    start, end = STACK
    return SECRET.encode() in ctypes.string_at(start, end - start)


def start_many_threads(_: Given) -> object:
    stop, threads = threading.Event(), []
    try:
        for _number in range(4 * THREADS):
            thread = threading.Thread(target=stop.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        return len(threads)
    finally:
        stop.set()
    return len(threads)


def kill_in_earnest(given: Given) -> object:
    outcomes = []
    for pid in (given.victim, given.parent):
        for kill in (
            lambda pid: os.kill(pid, signal.SIGKILL),
            lambda pid: call("tgkill", pid, pid, signal.SIGKILL),
            # The kernel uses the lower 32 bits, which are the victim's number; a filter may compare all.
            lambda pid: call("kill", pid | 1 << 32, signal.SIGKILL),
            lambda pid: call("kill", -pid, signal.SIGKILL),
            lambda pid: call("tgkill", os.getpid(), pid, signal.SIGKILL),
        ):
            try:
                kill(pid)
                outcomes.append("ok")
            except OSError as error:
                outcomes.append(errno.errorcode[error.errno or 0])
    return outcomes


def a_call_of_x32(_: Given) -> None:
    libc.syscall(ctypes.c_long(0x40000000 | 39))


def a_call_of_x32_in_a_thread(given: Given) -> None:
    thread = threading.Thread(target=a_call_of_x32, args=(given,))
    thread.start()
    thread.join()


def a_call_of_32_bits(_: Given) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    prot = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    page = mmap.mmap(-1, mmap.PAGESIZE, flags, prot)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()


def clone3(_: Given) -> None:
    call("clone3", NULL, 0)


def import_more(_: Given) -> None:
    import colorsys  # noqa: F401 - nothing has imported it before
    import sqlite3  # noqa: F401 - a library that must be mapped


def speak_to_a_driver(_: Given) -> None:
    fcntl.ioctl(3, 0xC00846C8, b"\0" * 8)  # an ioctl of NVIDIA, which a socket does not know


LOOKS: dict[str, Try] = {
    look.__name__: look
    for look in (
        allocate,
        allocate_a_mapping,
        allocate_little_by_little,
        write_too_early,
        write_the_result,
        open_many,
        raise_limits,
        look_at_itself,
        look_for_the_secret,
        start_many_threads,
        kill_in_earnest,
        a_call_of_x32,
        a_call_of_x32_in_a_thread,
        a_call_of_32_bits,
        clone3,
        import_more,
        speak_to_a_driver,
    )
}


# The launcher.

STACK = (0, 0)


class Launcher:
    """The process whose forks are confined, like a zygote's forks."""

    def __init__(self) -> None:
        global STACK
        self.folder = Path(tempfile.mkdtemp(prefix="ndif-test-"))
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("[stack]"):
                first, last = line.split()[0].split("-")
                STACK = (int(first, 16), int(last, 16))
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(self.folder / "socket"))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0ndif-test-{os.getpid()}")
        for listening in (self.unix, self.abstract):
            listening.listen(64)
        self.victim = os.fork()
        if self.victim == 0:
            _end_with_parent()
            while True:
                signal.pause()

    def close(self) -> None:
        os.kill(self.victim, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ground(self) -> Given:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        inside, outside = folder / "inside", folder / "outside"
        for place in (inside, outside):
            (place / "folder").mkdir(parents=True)
            (place / "file").write_text("within")
        (inside / "link").symlink_to(outside / "file")
        return Given(
            inside,
            outside,
            self.victim,
            os.getpid(),
            self.tcp.getsockname()[1],
            self.unix.getsockname(),
            "\0" + self.abstract.getsockname()[1:].decode(),
        )

    def run(self, names: list[str], cell: str) -> dict[str, Any]:
        """Let a fork in a cell make attempts; return its outcomes, and observations from outside."""
        given = self.ground()
        confine = CELLS[cell](given)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            ours.close()
            _be_confined(names, confine, theirs.detach(), given)
        theirs.close()
        if given.confinement is not None and given.confinement.rules is not None:
            os.close(given.confinement.rules)
        answer: dict[str, Any] = {"pid": pid, "outcomes": {}}
        with ours, (given.outside / "result").open("wb") as file:
            ours.settimeout(PATIENCE_S)
            try:
                answer["said"] = ours.recv(1 << 16).decode()
                if answer["said"] == CONFINED:
                    answer["seen"] = _observe(pid)
                    socket.send_fds(ours, [b"go"], [file.fileno()])
                    answer["outcomes"] = dict(map(json.loads, _all_of(ours).splitlines()))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
            answer["ended"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            answer["result_bytes"] = file.seek(0, os.SEEK_END)
        answer["victim"] = os.waitpid(self.victim, os.WNOHANG) == (0, 0)
        shutil.rmtree(given.inside.parent, ignore_errors=True)
        return answer


def _end_with_parent() -> None:
    libc.prctl(1, signal.SIGKILL)


def _all_of(connection: socket.socket) -> bytes:
    text = b""
    while more := connection.recv(1 << 16):
        text += more
    return text


def _observe(pid: int) -> dict[str, Any]:
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "status": {name: value.strip() for name, value in status.items()},
        "oom_score_adj": (folder / "oom_score_adj").read_text().strip(),
        "limits": {
            line[:26].strip(): line[26:].split()[:2]
            for line in _or_nothing(folder / "limits").splitlines()[1:]
        },
    }


def _or_nothing(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _be_confined(
    names: list[str], confine: Callable[[int], int], channel: int, given: Given
) -> NoReturn:
    status = 1
    try:
        host = CONNECTIONS[confine(channel)]
        host.sendall(CONFINED.encode())
        _, fds, _, _ = socket.recv_fds(host, 2, 1)
        given.file = fds[0]
        for name in names:
            run = LOOKS.get(name) or STILL.get(name) or ATTEMPTS[name].run
            host.sendall(json.dumps([name, _outcome(run, given)]).encode() + b"\n")
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(next(iter(CONNECTIONS), 3), repr(error).encode())
    finally:
        os._exit(status)


def _outcome(run: Try, given: Given) -> object:
    try:
        answer = run(given)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except NoSuchCallError:
        return "no such call"
    except Exception as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    if run in LOOKS.values():
        return answer
    return answer if isinstance(answer, (str, list)) else "ok"


CONFINED = "confined"
CONNECTIONS: dict[int, socket.socket] = {}


def _as_third(channel: int) -> int:
    """Move the channel to the number that it has in a confined process."""
    os.dup2(channel, 3)
    CONNECTIONS[3] = socket.socket(fileno=3)
    return 3


def _free(_: Given) -> Callable[[int], int]:
    return _as_third


def _by_files(given: Given) -> Callable[[int], int]:
    from ndif.sandbox.confinement.confinement import interpreter_paths
    from ndif.sandbox.confinement.landlock import create_ruleset, restrict_self

    rules = create_ruleset([*interpreter_paths(), given.inside], [Path(os.devnull)])

    def confine(channel: int) -> int:
        held = fcntl.fcntl(rules, fcntl.F_DUPFD, 10)
        _as_third(channel)
        libc.prctl(38, 1, 0, 0, 0)
        restrict_self(held)
        return 3

    return confine


def _by_calls(_: Given) -> Callable[[int], int]:
    from ndif.sandbox.confinement.seccomp import Filter

    calls = Filter.compile(devices=False)

    def confine(channel: int) -> int:
        _as_third(channel)
        calls.load()
        return 3

    return confine


def _by(mode: Any, *, gpu: bool = False) -> Callable[[Given], Callable[[int], int]]:
    def prepare(given: Given) -> Callable[[int], int]:
        from ndif.sandbox.confinement.confinement import Confinement, DriverFiles

        confinement = given.confinement = Confinement.prepare(
            mode,
            readable=[given.inside],
            memory_bytes=MEMORY,
            result_bytes=RESULT,
            max_threads=THREADS,
            driver=DriverFiles((), (), ()) if gpu else None,
        )

        def confine(channel: int) -> int:
            kept = confinement.detach(channel)
            CONNECTIONS[kept] = socket.socket(fileno=kept)
            confinement.apply((lambda: None) if gpu else None)
            return kept

        return confine

    return prepare


CELLS: dict[str, Callable[[Given], Callable[[int], int]]] = {
    "free": _free,
    "files": _by_files,
    "calls": _by_calls,
    "whole": _by("require"),
    "best-effort": _by("best-effort"),
    "off": _by("off"),
    "gpu": _by("require", gpu=True),
}


def _be_nobody() -> None:
    """Become a user other than root, who can read this interpreter until confined."""
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    reading = 1 << 2  # CAP_DAC_READ_SEARCH
    assert libc.capset(header, (ctypes.c_uint32 * 6)(reading, reading)) == 0
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which a change of user clears


def main() -> None:
    if sys.argv[1] == "nobody":
        _be_nobody()
    launcher = Launcher()
    try:
        for line in sys.stdin:
            names, cell = json.loads(line)
            print(json.dumps(launcher.run(names, cell)), flush=True)
    finally:
        launcher.close()


# The tests.


class Lab:
    """A launcher process and its protocol."""

    def __init__(self, user: str) -> None:
        self._attempted: dict[str, dict[str, Any]] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sandbox.confinement.test_confinement", user],
            cwd=ROOT,
            env={**os.environ, "HF_TOKEN": SECRET, "TMPDIR": "/tmp"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, cell: str = "whole") -> dict[str, Any]:
        """Return the answer for one attempt, made in a separate process."""
        answer = self._ask([name], cell)
        answer["outcome"] = answer["outcomes"].get(name, "nothing was said")
        return answer

    def outcome(self, name: str, cell: str = "whole") -> Any:
        return self.run(name, cell)["outcome"]

    def attempted(self, name: str, cell: str) -> Any:
        """Return the outcome of an attempt; one process makes all attempts that a cell refuses."""
        if cell not in self._attempted:
            names = [name for name, row in ATTEMPTS.items() if cell in (*row.by, "whole", "gpu")]
            answer = self._ask(names, cell)
            assert answer["victim"], "the victim is dead"
            self._attempted[cell] = answer["outcomes"]
        outcome = self._attempted[cell].get(name, "the process had ended")
        if outcome == "no such call":
            pytest.skip("this architecture has no such call")
        return outcome

    def _ask(self, names: list[str], cell: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([names, cell]) + "\n")
        self._process.stdin.flush()
        patience = threading.Timer(2 * PATIENCE_S, self._process.kill)
        patience.start()
        try:
            line = self._process.stdout.readline()
        finally:
            patience.cancel()
        assert line, "the launcher ended"
        answer: dict[str, Any] = json.loads(line)
        assert answer["said"] == CONFINED, answer["said"]
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()


def _lab(user: str) -> Iterator[Lab]:
    lab = Lab(user)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def own() -> Iterator[Lab]:
    """A launcher that runs as the user of the tests."""
    yield from _lab("own")


@pytest.fixture(scope="module")
def nobody() -> Iterator[Lab]:
    if os.getuid() != 0:
        pytest.skip("the tests run as no root already")
    yield from _lab("nobody")


@pytest.fixture(scope="module", params=["own", "nobody"])
def lab(request: pytest.FixtureRequest) -> Lab:
    return cast(Lab, request.getfixturevalue(request.param))


def landlock_since(version: int) -> None:
    from ndif.sandbox.confinement.landlock import abi

    if abi() < version:
        pytest.skip(f"Landlock holds this from version {version} on; here is {abi()}")


@pytest.mark.parametrize("name", ATTEMPTS)
def test_confined_process_is_refused_every_attempt(lab: Lab, name: str) -> None:
    assert lab.attempted(name, "whole") in REFUSED


@pytest.mark.parametrize("name", [name for name, row in ATTEMPTS.items() if row.tried_freely])
def test_attempt_has_other_outcome_without_confinement(own: Lab, name: str) -> None:
    if os.getuid() != 0:
        pytest.skip("not root: the system itself refuses much of it")
    outcome = own.outcome(name, "free")
    assert isinstance(outcome, list) or outcome not in REFUSED


@pytest.mark.parametrize(
    ("name", "layer"), [(name, layer) for name, row in ATTEMPTS.items() for layer in row.by]
)
def test_each_claimed_layer_alone_refuses_attempt(own: Lab, name: str, layer: str) -> None:
    if layer == "files":
        landlock_since(ATTEMPTS[name].abi)
    assert own.attempted(name, layer) in REFUSED


@pytest.mark.parametrize("name", STILL)
@pytest.mark.parametrize("cell", ["whole", "gpu", "best-effort", "off"])
def test_confined_process_can_do_actions_a_trace_needs(lab: Lab, name: str, cell: str) -> None:
    assert lab.outcome(name, cell) == "ok"


def test_confined_process_can_import_library_late(own: Lab) -> None:
    assert own.outcome("import_more") is None


def test_confined_process_kills_no_other_process(lab: Lab) -> None:
    answer = lab.run("kill_in_earnest")
    # Process numbers with extra bits, groups, and threads of other processes.
    assert set(answer["outcome"]) <= {"EPERM", "ESRCH"}
    assert answer["outcome"][0] == "EPERM"
    assert answer["victim"]


@pytest.mark.parametrize(
    "name", ["a_call_of_x32", "a_call_of_x32_in_a_thread", "a_call_of_32_bits"]
)
def test_system_call_of_other_architecture_kills_process(own: Lab, name: str) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("an architecture with one table")
    assert own.run(name)["ended"] == -signal.SIGSYS


def test_clone3_fails_with_enosys_so_that_libc_uses_clone(own: Lab) -> None:
    assert own.outcome("clone3") == "ENOSYS"
    assert own.outcome("clone3", "free") == "EINVAL"


# The confined process, seen from inside and outside.


@pytest.mark.parametrize("cell", ["whole", "gpu", "best-effort"])
def test_confined_process_has_no_environment_privileges_or_extra_descriptors(
    lab: Lab, cell: str
) -> None:
    answer = lab.run("look_at_itself", cell)
    outcome, observed = answer["outcome"], answer["seen"]
    # Standard streams, the channel, and the result file.
    assert sorted(map(int, outcome["descriptors"])) == [0, 1, 2, 3, 4]
    assert outcome["descriptors"]["3"] == fcntl.FD_CLOEXEC
    assert outcome["streams"] == [True] * 3
    assert outcome["environment"] == {}
    assert outcome["session"] == outcome["group"] == outcome["pid"] == answer["pid"]
    status = observed["status"]
    for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert int(status[name], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["Threads"] == "1"
    assert observed["oom_score_adj"] == "1000"


def test_confined_process_has_resource_limits(own: Lab) -> None:
    limits = own.run("look_at_itself")["seen"]["limits"]
    for name in (
        "Max core file size",
        "Max msgqueue size",
        "Max nice priority",
        "Max realtime priority",
        "Max locked memory",
    ):
        assert limits[name] == ["0", "0"]
    assert limits["Max open files"] == ["256", "256"]
    assert limits["Max pending signals"] == ["256", "256"]
    assert limits["Max file size"] == ["0", str(RESULT)]
    soft, hard = limits["Max data size"]
    assert soft == hard
    assert MEMORY < int(soft) < 2 * MEMORY + (1 << 30)


@pytest.mark.parametrize("name", ["allocate", "allocate_a_mapping", "allocate_little_by_little"])
def test_memory_limit_is_enforced(lab: Lab, name: str) -> None:
    assert lab.outcome(name) in ("MemoryError", "ENOMEM")
    assert lab.outcome(name, "free") is None


def test_kernel_does_not_limit_memory_on_gpu(own: Lab) -> None:
    assert own.outcome("allocate", "gpu") is None


def test_result_file_is_not_writable_before_permission(lab: Lab) -> None:
    answer = lab.run("write_too_early")
    assert answer["outcome"] == "EFBIG"
    assert answer["result_bytes"] == 0


def test_result_file_size_is_limited(lab: Lab) -> None:
    answer = lab.run("write_the_result")
    assert answer["outcome"] == "EFBIG"
    assert answer["result_bytes"] == RESULT


def test_resource_limits_cannot_be_raised(lab: Lab) -> None:
    outcome = lab.outcome("raise_limits")
    assert len(outcome) == 5, outcome
    assert set(outcome.values()) <= {"ValueError", "PermissionError", "OSError"}


def test_number_of_descriptors_is_limited(lab: Lab) -> None:
    assert lab.outcome("open_many") == 255


def test_number_of_threads_is_limited_for_non_root(nobody: Lab) -> None:
    # Other processes of this user start and end meanwhile.
    assert nobody.outcome("start_many_threads") < 2 * THREADS
    assert nobody.outcome("start_many_threads", "free") == 4 * THREADS


def test_the_initial_environment_is_not_in_memory(own: Lab) -> None:
    assert own.outcome("look_for_the_secret", "free") is True
    assert own.outcome("look_for_the_secret") is False


# Modes.


def test_sandbox_off_changes_nothing(own: Lab) -> None:
    answer = own.run("look_at_itself", "off")
    assert answer["outcome"]["environment"]["HF_TOKEN"] == SECRET
    assert answer["outcome"]["session"] != answer["pid"]
    assert (
        answer["seen"]["status"]["Seccomp"]
        == own.run("clone3", "free")["seen"]["status"]["Seccomp"]
    )
    assert own.outcome("read_outside", "off") == "ok"
    for name, size in (("write_too_early", 1), ("write_the_result", RESULT + 1)):
        answer = own.run(name, "off")
        assert answer["outcome"] is None
        assert answer["result_bytes"] == size


@pytest.mark.parametrize(
    "name", ["read_outside", "create", "connect_tcp", "fork", "kill_a_victim", "trace", "chmod"]
)
def test_best_effort_uses_every_layer(lab: Lab, name: str) -> None:
    assert lab.outcome(name, "best-effort") in REFUSED


OF_ANOTHER_DESCRIPTOR = {"type_into_a_terminal", "be_signalled_for_a_descriptor"}
"""Ioctls whose outcome depends on the kind of the descriptor or on its owner."""


ALLOWED_ON_A_GPU = {"share_memory", "share_memory_by_number"}
"""Attempts that a driver may need; see docs/security.md."""


@pytest.mark.parametrize("name", sorted(ATTEMPTS.keys() - OF_ANOTHER_DESCRIPTOR - ALLOWED_ON_A_GPU))
def test_confined_gpu_process_is_refused_attempt(own: Lab, name: str) -> None:
    assert own.attempted(name, "gpu") in REFUSED


def test_driver_ioctls_are_allowed_only_on_a_gpu(own: Lab) -> None:
    assert own.outcome("speak_to_a_driver", "gpu") == "ENOTTY"
    assert own.outcome("speak_to_a_driver") == "EPERM"


@pytest.mark.parametrize("name", sorted(ALLOWED_ON_A_GPU))
def test_confined_gpu_process_may_share_memory(own: Lab, name: str) -> None:
    assert own.attempted(name, "gpu") != "EPERM"


if __name__ == "__main__":
    main()
