"""Landlock: the files that a process may open, and the sockets and processes it may reach (landlock(7))."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from landlock import FSAccess, LandlockError
from landlock.plumbing import (
    CREATE_RULESET_VERSION,
    PathBeneathAttr,
    RulesetAttr,
    get_add_rule,
    get_create_ruleset,
    get_restrict_self,
)

_NET = 1 << 0 | 1 << 1
"""Binding and connecting TCP sockets: handled without any rule, so every port is refused."""

_SCOPES = 1 << 0 | 1 << 1
"""Abstract sockets of other processes, and signals to other processes."""

_TRUNCATE_ABI, _NET_ABI, _DEVICE_ABI, _SCOPE_ABI = 3, 4, 5, 6
_RULE_PATH_BENEATH = 1
_READ = FSAccess.READ_FILE | FSAccess.READ_DIR
_WRITE = FSAccess.READ_FILE | FSAccess.WRITE_FILE
_CREATE = (
    _READ
    | _WRITE
    | FSAccess.MAKE_REG
    | FSAccess.MAKE_DIR
    | FSAccess.REMOVE_FILE
    | FSAccess.REMOVE_DIR
)


class _Attributes(ctypes.Structure):
    """`struct landlock_ruleset_attr` with the fields of later versions."""

    _fields_ = [
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


def abi() -> int:
    """Return the version of this kernel's Landlock; 0 if it has none."""
    ctypes.set_errno(0)
    try:
        return int(get_create_ruleset()(None, 0, CREATE_RULESET_VERSION))
    except (LandlockError, OSError):
        return 0


def create_ruleset(
    readable: Iterable[Path],
    writable: Iterable[Path],
    truncatable: Iterable[Path] = (),
    creatable: Iterable[Path] = (),
    unlisted: Iterable[Path] = (),
    *,
    allows_network: bool = False,
) -> int:
    """Return the descriptor of a ruleset that permits the given paths, and no other file access.

    `writable` may also be opened for writing; `truncatable` may also be truncated when opened, as by
    `fopen`. Files in `unlisted` can be read but not listed. Files can be created and removed only in
    `creatable`, and executed nowhere. TCP ports need `allows_network`. Missing paths are left out.
    """
    version = abi()
    attributes = _Attributes(
        int(FSAccess.all()),
        _NET if version >= _NET_ABI and not allows_network else 0,
        _SCOPES if version >= _SCOPE_ABI else 0,
    )
    ctypes.set_errno(0)
    rules: int = get_create_ruleset()(
        ctypes.cast(ctypes.pointer(attributes), ctypes.POINTER(RulesetAttr)),
        ctypes.sizeof(attributes),
        0,
    )
    device = FSAccess.IOCTL_DEV if version >= _DEVICE_ABI else FSAccess(0)
    truncation = FSAccess.TRUNCATE if version >= _TRUNCATE_ABI else FSAccess(0)
    for paths, access in (
        (readable, _READ),
        (writable, _WRITE | device),
        (truncatable, _WRITE | truncation),
        (creatable, _CREATE | truncation),
        (unlisted, FSAccess.READ_FILE),
    ):
        for path in paths:
            _allow(rules, path, access)
    return rules


def restrict_self(rules: int) -> None:
    """Enforce a ruleset on this thread and on threads that it starts later; close the descriptor."""
    ctypes.set_errno(0)
    get_restrict_self()(rules, 0)
    os.close(rules)


def _allow(rules: int, path: Path, access: FSAccess) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not path.is_dir():
            access &= FSAccess.all_file()
        rule = PathBeneathAttr(access, fd)
        get_add_rule()(rules, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(fd)
