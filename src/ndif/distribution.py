"""This program as an installed package, and the commands that install what it lacks."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from importlib.util import find_spec

NAME = "ndif-server"
"""Name of the distribution; on the public index, `ndif` is another project."""

COMMAND_LINE = "ndif-cli"
"""Beginning of the `User-Agent` of commands, by which the server's log of events names them."""


def install_command(*packages: str) -> str:
    """Return the command that installs packages into this environment, in the versions it takes.

    An environment that uv has made has no pip.
    """
    pip = (
        [sys.executable, "-m", "pip", "install"]
        if find_spec("pip") is not None
        else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*pip, *map(_requirement, packages)])


def _requirement(package: str) -> str:
    """Return a package with the versions that the distribution requires, as pip takes it."""
    from packaging.requirements import Requirement

    try:
        listed = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # run from a source tree
        listed = []
    for requirement in map(Requirement, listed):
        if requirement.name == package:
            return f"{requirement.name}{requirement.specifier}"
    return package
