"""seccomp: the system calls that a confined process may make (seccomp(2), by libseccomp).

The filter is an allow-list: all other calls, including calls of later kernels, fail with EPERM until they
are reviewed. Calls of another architecture's table (32-bit, x32) end the process, with all its threads.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

import pyseccomp as seccomp

from ndif.sandbox.confinement.limits import PR_SET_NO_NEW_PRIVS, check, libc, prctl

_MEMORY = """brk madvise mprotect mremap msync munmap membarrier get_mempolicy"""
_THREADS = """futex futex_requeue futex_wait futex_waitv futex_wake futex_time64 get_robust_list getcpu
    gettid restart_syscall rseq sched_get_priority_max sched_get_priority_min sched_getaffinity sched_yield
    set_robust_list set_tid_address exit exit_group"""
_SIGNALS = """rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait
    sigaltstack pause"""
_TIME = """clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep time times getrusage"""
_FILES = """access close close_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait
    epoll_pwait2 epoll_wait eventfd eventfd2 faccessat faccessat2 fadvise64 fstat fstatfs getcwd getdents
    getdents64 lseek lstat newfstatat open openat openat2 pipe pipe2 poll ppoll pread64 preadv pselect6
    pwrite64 pwritev read readlink readlinkat readv select stat statfs statx write writev"""
_SELF = """arch_prctl getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom
    getresgid getresuid getsid getuid sysinfo uname umask"""

_FORKING = """fork vfork wait4 waitid kill tgkill setsid setpgid seccomp capget capset setrlimit getrlimit
    landlock_create_ruleset landlock_add_rule landlock_restrict_self memfd_create ftruncate socketpair
    sendmsg sendmmsg recvmmsg getsockname getpeername getsockopt setsockopt shutdown pidfd_open"""
"""Calls to fork processes, which confine themselves further, and to communicate with the host."""
_NAMESPACES = 0x7E020000
"""Flags of clone that create a namespace."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034

_CREATION = "mkdir mkdirat rename renameat renameat2 rmdir unlink unlinkat"
_MODES = "chmod fchmod fchmodat fchmodat2 utime utimes utimensat futimesat"

_ALLOWED = " ".join((_MEMORY, _THREADS, _SIGNALS, _TIME, _FILES, _SELF)).split()

_SHARED, _ANONYMOUS = mmap.MAP_SHARED, mmap.MAP_ANONYMOUS

_CLONE_VM, _CLONE_THREAD = 0x100, 0x10000
_THREAD = _CLONE_VM | _CLONE_THREAD

_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA = 15, 16, 0x53564D41
_IS_TERMINAL = 0x5401  # TCGETS: Python calls it when it opens a text file
_NO_BLOCKING, _NOT_INHERITED = 0x5421, 0x5451  # FIONBIO, FIOCLEX

_NVIDIA_KINDS = (0, ord("F"))
"""The second byte of nvidia-uvm's ioctls, and of the ioctls of nvidiactl and GPUs."""

_ALL_THREADS_API = 2
"""The API level of libseccomp from which the kernel can filter all threads at once."""

_FCNTL_COMMANDS = (
    fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL
)  # fmt: skip
"""fcntl commands without F_SETOWN: a descriptor can send any signal to its owner."""


_OWN_PID = 0x7EADBEEF
"""A placeholder for the PID of the process that loads the filter; no real PID is as high."""

_INSTRUCTION = struct.Struct("=HBBI")
_SET_MODE_FILTER, _ALL_THREADS = 1, 1
_SECCOMP = seccomp.resolve_syscall(seccomp.Arch.NATIVE, "seccomp")


def available() -> bool:
    """Return True if this kernel and libseccomp can filter system calls."""
    try:
        return bool(seccomp.get_api() >= _ALL_THREADS_API)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Filter:
    """A BPF program for the kernel: compiled once, loaded by each process."""

    program: bytes

    @classmethod
    def compile(
        cls, *, devices: bool = False, creation: bool = False, forking: bool = False
    ) -> Filter:
        """Compile a filter that allows the system calls that a trace needs.

        `devices` allows the ioctls of a GPU's driver; Landlock restricts the device files. `creation`
        allows creating and removing files where Landlock permits it; calls that change a file's mode or
        times then succeed without effect. `forking` allows forking processes, which may confine themselves.
        """
        rules = _rules(devices=devices)
        if forking:
            _allow_forking(rules)
        if creation:
            for name in _CREATION.split():
                _allow(rules, name)
            for name in _MODES.split():
                _add(rules, seccomp.ERRNO(0), name)
        with os.fdopen(os.memfd_create("filter"), "w+b") as file:
            rules.export_bpf(file)
            file.seek(0)
            return cls(file.read())

    def load(self, *, this_thread: bool = False) -> None:
        """Apply the filter irrevocably to this process, or to this thread and threads that it starts."""
        code = bytearray(self.program)
        for offset in range(0, len(code), _INSTRUCTION.size):
            operation, yes, no, operand = _INSTRUCTION.unpack_from(code, offset)
            if operand == _OWN_PID:
                _INSTRUCTION.pack_into(code, offset, operation, yes, no, os.getpid())
        instructions = (ctypes.c_char * len(code)).from_buffer(code)
        program = _Program(len(code) // _INSTRUCTION.size, ctypes.addressof(instructions))
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        flags = 0 if this_thread else _ALL_THREADS
        result = libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, ctypes.byref(program))
        check(result, "seccomp")


class _Program(ctypes.Structure):
    """struct sock_fprog (seccomp(2))."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _rules(*, devices: bool) -> seccomp.SyscallFilter:
    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
    for name in _ALLOWED:
        _allow(rules, name)
    # No shared anonymous memory: a page that is written and dropped stays allocated, and is not counted.
    _allow(rules, "mmap", seccomp.Arg(3, seccomp.MASKED_EQ, _SHARED, 0))
    # A GPU's driver may map shared anonymous memory.
    mask = _SHARED if devices else _SHARED | _ANONYMOUS
    _allow(rules, "mmap", seccomp.Arg(3, seccomp.MASKED_EQ, mask, _SHARED))
    # Threads, not processes. A filter cannot read the arguments of clone3; ENOSYS makes glibc use clone.
    _allow(rules, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _THREAD, _THREAD))
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    for name, process in (("kill", _OWN_PID), ("tgkill", _OWN_PID), ("prlimit64", 0)):
        _allow(rules, name, seccomp.Arg(0, seccomp.EQ, process))
    for option in (_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA):
        _allow(rules, "prctl", seccomp.Arg(0, seccomp.EQ, option))
    for command in _FCNTL_COMMANDS:
        _allow(rules, "fcntl", seccomp.Arg(1, seccomp.EQ, command))
    # The channel to the host is already open; sockets cannot be connected, bound, or sent to by address.
    for name in ("recvfrom", "recvmsg"):
        _allow(rules, name)
    _allow(rules, "sendto", seccomp.Arg(4, seccomp.EQ, 0))
    for request in (_IS_TERMINAL, _NO_BLOCKING, _NOT_INHERITED):
        _allow(rules, "ioctl", seccomp.Arg(1, seccomp.EQ, request))
    if devices:
        for kind in _NVIDIA_KINDS:
            _allow(rules, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFF00, kind << 8))
        for name in ("mlock", "munlock"):
            _allow(rules, name)
    return rules


def _allow_forking(rules: seccomp.SyscallFilter) -> None:
    for name in _FORKING.split():
        _allow(rules, name)
    _allow(rules, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, _NAMESPACES, 0))
    for option in (_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS):
        _allow(rules, "prctl", seccomp.Arg(0, seccomp.EQ, option))
    for command in (_F_ADD_SEALS, _F_GET_SEALS):
        _allow(rules, "fcntl", seccomp.Arg(1, seccomp.EQ, command))


def _allow(rules: seccomp.SyscallFilter, name: str, *conditions: seccomp.Arg) -> None:
    _add(rules, seccomp.ALLOW, name, *conditions)


def _add(rules: seccomp.SyscallFilter, action: int, name: str, *conditions: seccomp.Arg) -> None:
    try:
        rules.add_rule(action, name, *conditions)
    except OSError as error:
        # This architecture, or this version of libseccomp, has no such call.
        if error.errno not in (errno.EDOM, errno.EINVAL, errno.EFAULT):
            raise
