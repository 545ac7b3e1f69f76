"""Debian packages of the services: missing ones are installed, if permitted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

_REQUIRE = "TEST_SERVICES"
_LOCK = Path(tempfile.gettempdir()) / "ndif-test-packages.lock"
_POLICY = Path("/usr/sbin/policy-rc.d")
_REFUSE = "#!/bin/sh\n# A package's own service is not started.\nexit 101\n"
_APT = ("apt-get", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3")


def need(program: str, *packages: str) -> str:
    """Return the path of `program`, after installing its packages if necessary.

    If that is impossible, skip the test, or fail it if services are required.
    """
    # While another test process installs a package, its programs exist before they can run.
    with _locked(fcntl.LOCK_SH):
        path = shutil.which(program, path=_path())
    if path is not None:
        return path
    refused = _install(program, packages)
    path = shutil.which(program, path=_path())
    if path is None:
        go_without(f"{program} is missing: apt-get install {' '.join(packages)} ({refused})")
    return path


def go_without(reason: str) -> NoReturn:
    """Skip a test that this machine cannot run, or fail it if all services are required."""
    if os.environ.get(_REQUIRE) == "require":
        pytest.fail(f"{reason}; {_REQUIRE}=require", pytrace=False)
    warnings.warn(f"tests were skipped: {reason}", stacklevel=3)
    pytest.skip(reason)


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"


def _install(program: str, packages: tuple[str, ...]) -> str:
    """Install `packages`; return the reason why not, or the program's errors."""
    if shutil.which("apt-get") is None:
        return "this is no Debian"
    if os.geteuid() != 0:
        return "only root installs packages"
    # Parallel test processes may all find a program missing at once.
    with _locked(fcntl.LOCK_EX):
        if shutil.which(program, path=_path()):
            return ""
        command = (*_APT, "install", "-y", "--no-install-recommends", *packages)
        with _no_daemons():
            process = _run(*command)
            if process.returncode != 0:  # for example if the package lists were never fetched
                _run(*_APT, "update")
                process = _run(*command)
    return process.stderr.strip()[-500:]


@contextlib.contextmanager
def _locked(kind: int) -> Iterator[None]:
    """Hold the lock of package installations, which only root does."""
    if os.geteuid() != 0:
        yield
        return
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, kind)
        yield


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, env=quiet, capture_output=True, text=True)


@contextlib.contextmanager
def _no_daemons() -> Iterator[None]:
    """Keep packages from starting their services."""
    if _POLICY.exists():
        # An existing policy decides.
        yield
        return
    _POLICY.write_text(_REFUSE)
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
