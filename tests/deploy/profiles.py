"""The system call filters that engines and units apply to a server."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from tests.deploy.dockerfile import ROOT
from tests.services.packages import go_without, need

UNITS = ROOT / "deploy" / "systemd"
YOUNGER = frozenset({"futex_requeue", "futex_wait", "futex_wake", "futex_waitv", "fchmodat2"})
"""Calls that are newer than some engines and systemds; a refused caller falls back to an older call."""
_PACKAGE = "golang-github-docker-docker-dev"
_FILE = "usr/share/gocode/src/github.com/docker/docker/profiles/seccomp/default.json"


def docker_profile(folder: Path) -> Path:
    """Return the default profile of this Debian's Docker, which is older than most: 20.10 in Debian 12."""
    download = ["apt-get", "-o", "Acquire::Retries=3", "download", "--quiet", _PACKAGE]
    process = subprocess.run(download, cwd=folder, capture_output=True, text=True)
    if process.returncode != 0:
        go_without(f"{_PACKAGE} cannot be downloaded: {process.stderr.strip()[-300:]}")
    [package] = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    return folder / _FILE


def unit_calls(name: str) -> set[str]:
    """Return the system calls that a unit allows."""
    line = next(
        line
        for line in (UNITS / name).read_text().splitlines()
        if line.startswith("SystemCallFilter=")
    )
    return {call for word in line.partition("=")[2].split() for call in _expanded(word)}


@cache
def _expanded(word: str) -> frozenset[str]:
    if not word.startswith("@"):
        return frozenset({word})
    need("systemd-analyze", "systemd")
    process = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter", word],
        capture_output=True,
        text=True,
        check=True,
    )
    calls: set[str] = set()
    for text in process.stdout.splitlines()[1:]:
        if (name := text.strip()) and not name.startswith("#"):
            calls |= _expanded(name)
    return frozenset(calls)
