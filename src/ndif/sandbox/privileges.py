"""What a process may become: nothing more than it is (prctl(2), capabilities(7))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES_V3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


_Data = ctypes.c_uint32 * 6
"""Effective, permitted and inheritable, each twice 32 bits."""


def drop() -> None:
    """Give up every capability, and the chance to gain any; let no other process look into this one.

    Raises:
        OSError: if the kernel refuses.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if _libc.capset(ctypes.byref(_Header(_CAPABILITIES_V3, 0)), _Data()) != 0:
        raise _error("capset")
    _prctl(_PR_SET_DUMPABLE, 0)
    # A change of capabilities may have undone it.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def without_capabilities() -> Iterator[None]:
    """Use none of this thread's capabilities meanwhile: what is opened remembers with which it was.

    Raises:
        OSError: if the kernel refuses.
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
