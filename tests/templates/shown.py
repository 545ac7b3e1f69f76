"""The environment and command line that /proc shows of a fork; without a change, they are its parent's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOM = "TEST_ROOM"
"""A variable that reserves space for the variables of a process's forks."""
_BYTES = 16384
_ARGUMENTS, _ENVIRONMENT = 45, 47
"""Positions of their start addresses in /proc/self/stat, counted after the command's name. The end address
follows each."""


def with_room(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with space for the variables of the process's forks."""
    return {**environment, ROOM: " " * _BYTES}


def show_environment(environment: Mapping[str, str]) -> None:
    """Change the variables that /proc shows of this process."""
    _write(_ENVIRONMENT, (f"{name}={value}" for name, value in environment.items()))


def show_arguments(arguments: Sequence[str]) -> None:
    """Change the command line that /proc shows of this process."""
    _write(_ARGUMENTS, arguments)


def _write(position: int, texts: Iterable[str]) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[position]), int(fields[position + 1])
    content = b"".join(os.fsencode(text) + b"\0" for text in texts)
    ctypes.memmove(start, content[: end - start].ljust(end - start, b"\0"), end - start)
