"""Detection of the confinement layers that this machine has."""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from ndif.sandbox.confinement.cgroup import CgroupError, RunnerCgroups

_PACKAGE = "landlock>=1.0.0.dev5"
"""The requirement in pyproject.toml: without a version, pip installs a release that is too old."""
_FIRST_KERNEL = (5, 13)
_LATER = (
    (3, "truncation", "6.2", "seccomp"),
    (4, "TCP", "6.7", "seccomp"),
    (5, "device ioctls", "6.10", "no other layer (matters on GPUs)"),
    (6, "signals and abstract sockets", "6.12", "seccomp"),
)
"""Later additions to Landlock: ABI, name, kernel, and the layer that covers their absence."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A kernel mechanism that confines a process."""

    name: str
    present: bool
    required: bool
    """True if untrusted code may not run without this layer."""
    detail: str
    """The version or mechanism in use, or advice on how to get the layer."""


def detect_layers() -> list[Layer]:
    """Return every layer, with its state on this machine."""
    return [*_landlock(), _seccomp(), *_always()]


def missing_layers(layers: list[Layer]) -> list[Layer]:
    """Return the required layers that are not present."""
    return [layer for layer in layers if layer.required and not layer.present]


def _landlock() -> list[Layer]:
    try:
        from ndif.sandbox.confinement.landlock import abi

        version = abi()
    except ImportError as error:
        advice = f"pip install '{_PACKAGE}' ({error})"
        return [Layer("Landlock", False, True, advice)]
    kernel = platform.release()
    if version < 1:
        major, minor = re.findall(r"\d+", kernel)[:2]
        advice = (
            f"kernel {kernel}; needs 5.13 or later"
            if (int(major), int(minor)) < _FIRST_KERNEL
            else f"kernel {kernel} does not enable it: build the kernel with CONFIG_SECURITY_LANDLOCK, and "
            "boot it with landlock in the lsm= parameter"
        )
        return [Layer("Landlock: files", False, True, advice)]
    layers = [Layer("Landlock: files", True, True, f"ABI {version}, kernel {kernel}")]
    for since, name, needed, otherwise in _LATER:
        is_present = version >= since
        lacking = f"needs kernel {needed}; covered by {otherwise}"
        layers.append(
            Layer(
                f"Landlock: {name}", is_present, False, f"ABI {version}" if is_present else lacking
            )
        )
    return layers


def _seccomp() -> Layer:
    name = "seccomp: system calls"
    try:
        from ndif.sandbox.confinement.seccomp import available
    except (ImportError, RuntimeError, OSError):
        advice = "apt install libseccomp2 (Debian, Ubuntu), or conda install libseccomp"
        return Layer(name, False, True, f"libseccomp is missing: {advice}")
    is_present = available()
    return Layer(name, is_present, True, "an allow-list" if is_present else "not in this kernel")


def _always() -> list[Layer]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    threads = (
        "the resource watchdog (the kernel sets root no limit)"
        if os.getuid() == 0
        else "setrlimit, and the resource watchdog"
    )
    if resource.RLIM_INFINITY not in (soft, hard):
        threads += f"; limit of this user: {soft}"
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except FileNotFoundError:
        scope = "0"
    ptrace = (
        f"yama ptrace_scope {scope}" if scope != "0" else "no Yama; covered by seccomp and Landlock"
    )
    return [
        Layer("no new privileges, no capabilities", True, True, "prctl, capset"),
        Layer("limits: memory, files, core", True, True, "setrlimit, and the resource watchdog"),
        Layer("limits: threads", True, False, threads),
        Layer("other processes' memory, beyond Landlock", scope != "0", False, ptrace),
        _cgroup(),
    ]


def _cgroup() -> Layer:
    name = "limits: a cgroup per request"
    try:
        base = RunnerCgroups.find().base
    except (CgroupError, OSError) as error:
        advice = (
            f"none: {error}; covered by the resource watchdog and seccomp. With cgroups of version 2, "
            "`systemd-run --user --scope -p Delegate=yes ndif …` delegates one"
        )
        return Layer(name, False, False, advice)
    return Layer(name, True, False, f"below {base}")
