"""Detection of the layers of the confinement that this machine has."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

_FIRST_KERNEL = (5, 13)
_FS_ABI, _TRUNCATE_ABI, _NET_ABI, _DEVICE_ABI, _SCOPE_ABI = 1, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class Layer:
    """One mechanism of the kernel that confines a process."""

    name: str
    present: bool
    required: bool
    """True if untrusted code may not run without this layer."""
    detail: str
    """The version or mechanism found, or how to get the layer."""


def detect_layers() -> list[Layer]:
    """Return every layer, with its state on this machine."""
    return [*_landlock(), _seccomp(), *_always()]


def missing_layers(found: list[Layer]) -> list[Layer]:
    """Return the required layers that are not present."""
    return [layer for layer in found if layer.required and not layer.present]


def _landlock() -> list[Layer]:
    try:
        from ndif.sandbox.confinement.landlock import abi

        version = abi()
    except ImportError as error:
        return [Layer("Landlock", False, True, f"pip install landlock ({error})")]
    kernel = platform.release()
    if version < _FS_ABI:
        advice = (
            f"kernel {kernel}; needs 5.13 or later"
            if _older_than_landlock(kernel)
            else (
                f"kernel {kernel} does not enable it: build the kernel with CONFIG_SECURITY_LANDLOCK, and "
                "boot it with landlock in the lsm= parameter"
            )
        )
        return [Layer("Landlock: files", False, True, advice)]

    def since(abi: int, name: str, kernel_needed: str, otherwise: str) -> Layer:
        there = version >= abi
        detail = (
            f"ABI {version}" if there else f"needs kernel {kernel_needed}; covered by {otherwise}"
        )
        return Layer(f"Landlock: {name}", there, False, detail)

    return [
        Layer("Landlock: files", True, True, f"ABI {version}, kernel {kernel}"),
        since(_TRUNCATE_ABI, "truncation", "6.2", "seccomp"),
        since(_NET_ABI, "TCP", "6.7", "seccomp"),
        since(_DEVICE_ABI, "device ioctls", "6.10", "no other layer (matters on GPUs)"),
        since(_SCOPE_ABI, "signals and abstract sockets", "6.12", "seccomp"),
    ]


def _older_than_landlock(kernel: str) -> bool:
    major, minor = re.findall(r"\d+", kernel)[:2]
    return (int(major), int(minor)) < _FIRST_KERNEL


def _seccomp() -> Layer:
    try:
        from ndif.sandbox.confinement.seccomp import available
    except (ImportError, RuntimeError, OSError):
        return Layer(
            "seccomp: system calls",
            False,
            True,
            "libseccomp is missing: apt install libseccomp2 (Debian, Ubuntu), or conda install libseccomp",
        )
    there = available()
    return Layer(
        "seccomp: system calls", there, True, "an allow-list" if there else "not in this kernel"
    )


def _always() -> list[Layer]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    counted = os.getuid() != 0
    threads = (
        "setrlimit, and the resource watchdog"
        if counted
        else "the resource watchdog (the kernel sets root no limit)"
    )
    unlimited = resource.RLIM_INFINITY in (soft, hard)
    threads += "" if unlimited else f"; limit of this user: {soft}"
    return [
        Layer("no new privileges, no capabilities", True, True, "prctl, capset"),
        Layer("limits: memory, files, core", True, True, "setrlimit, and the resource watchdog"),
        Layer("limits: threads", True, False, threads),
        _ptrace(),
    ]


def _ptrace() -> Layer:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        scope = "0"
    detail = (
        f"yama ptrace_scope {scope}" if scope != "0" else "no Yama; covered by seccomp and Landlock"
    )
    return Layer("other processes' memory, beyond Landlock", scope != "0", False, detail)
