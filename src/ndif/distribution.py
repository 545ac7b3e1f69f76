"""The installed distribution: its name, and the commands that install missing packages."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from importlib.util import find_spec

NAME = "ndif-server"
"""Distribution name; on PyPI, `ndif` is another project."""

COMMAND_LINE = "ndif-cli"
"""`User-Agent` prefix of commands; the server's event log attributes their events by it."""


def install_command(*packages: str) -> str:
    """Return the shell command that installs packages into this environment, in supported versions.

    It uses uv if pip is missing, as in an environment that uv has made.
    """
    pip = (
        [sys.executable, "-m", "pip", "install"]
        if find_spec("pip") is not None
        else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*pip, *map(_requirement, packages)])


def _requirement(package: str) -> str:
    """Return a package with the version specifier that the distribution declares for it, if any."""
    from packaging.requirements import Requirement

    try:
        listed = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # run from a source tree
        listed = []
    for requirement in map(Requirement, listed):
        if requirement.name == package:
            return f"{requirement.name}{requirement.specifier}"
    return package
