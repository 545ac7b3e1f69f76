"""Refusal of files, programs and connections by an audit hook (PEP 578).

A guard stops a block at the attribute by which it would reach `open`. An audit hook stops `open` itself,
also in a library that looks up an attribute by the block's text, or reads a folder that the block names.
Python does not report files that C code opens by itself.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ndif.sandbox.protector.libraries import LOADS_CODE
from ndif.sandbox.protector.names import words

_REFUSED = words("""
    os.chmod os.chown os.exec os.fork os.forkpty os.kill os.killpg os.link os.mkdir os.posix_spawn
    os.remove os.removexattr os.rename os.rmdir os.setxattr os.spawn os.startfile os.symlink os.system
    os.truncate os.utime pty.spawn shutil.move signal.pthread_kill
    socket.bind socket.connect socket.getaddrinfo socket.gethostbyaddr socket.gethostbyname
    socket.getnameinfo socket.getservbyname socket.sendto socket.sethostname
    sqlite3.connect subprocess.Popen
""")
"""Events that no block may cause."""

_READ = ("ctypes.dlopen", "os.getxattr", "os.listdir", "os.listxattr", "os.scandir")
"""Events whose first argument is a path that is only read."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class PermittedPaths:
    """The files and folders that a process may open from Python, without symbolic links."""

    reading: tuple[str, ...]
    writing: tuple[str, ...]
    unlisted: tuple[str, ...] = ()
    """Folders whose files may be read but not listed."""

    @classmethod
    def of(
        cls, readable: Iterable[Path], writable: Iterable[Path], unlisted: Iterable[Path] = ()
    ) -> PermittedPaths:
        """Resolve the paths below which a process may read, also write, or read without listing."""
        read, written, named = (
            tuple(dict.fromkeys(os.path.realpath(path) for path in paths))
            for paths in (readable, writable, unlisted)
        )
        return cls((*read, *written), written, named)


def refuse_effects(permitted: PermittedPaths) -> None:
    """Refuse all other files, and every program and connection, for the rest of this process.

    A refused call raises PermissionError, as it would under the kernel's confinement.
    """
    reading, writing = permitted.reading, permitted.writing
    opening = (*reading, *permitted.unlisted)

    def check_open(arguments: tuple[Any, ...]) -> None:
        path, _, flags = arguments
        if isinstance(path, int):
            return  # a descriptor that is open already
        writes = isinstance(flags, int) and flags & _WRITES
        _check(path, writing if writes else opening)

    def check_read(arguments: tuple[Any, ...]) -> None:
        if not isinstance(arguments[0], int):
            _check(arguments[0], reading)

    checks: dict[str, Callable[[tuple[Any, ...]], None]] = {
        LOADS_CODE: _refuse_code,
        **dict.fromkeys(_REFUSED, _refuse),
        **dict.fromkeys(_READ, check_read),
        "open": check_open,
    }
    find = checks.get

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        check = find(event)
        if check is not None:
            check(arguments)

    sys.addaudithook(hook)


def _check(path: object, permitted: tuple[str, ...]) -> None:
    """Raise PermissionError unless a path leads to or below a permitted one."""
    if isinstance(path, str):
        text = str.__str__(path)  # a subclass may override __str__
    elif type(path) is bytes:
        text = os.fsdecode(path)
    else:
        _refuse(path)
    real = os.path.realpath(text)
    if not any(real == allowed or real.startswith(allowed + os.sep) for allowed in permitted):
        _refuse(text)


def _refuse_code(_: object) -> NoReturn:
    raise PermissionError(
        errno.EPERM,
        "code from a folder or a repository is not run on this server; pass a function of your own, as in "
        "generate(custom_generate=function)",
    )


def _refuse(_: object) -> NoReturn:
    raise PermissionError(errno.EPERM, "a block cannot open files, programs or connections here")
