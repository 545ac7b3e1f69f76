"""The distinction between the server's packages and the modules of a request."""

from __future__ import annotations

import os
import sys
import sysconfig
import types

_PATHS = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
FOLDERS = tuple(f"{os.path.normpath(folder)}/" for folder in (*_PATHS, *sys.path) if folder)
"""The folders of the server's packages."""


def is_of_a_library(module: object) -> bool:
    """Return True for a module that is built in or was loaded from the folders of the server's packages."""
    spec = getattr(module, "__spec__", None) if isinstance(module, types.ModuleType) else None
    origin = getattr(spec, "origin", None)
    built_in = origin in ("built-in", "frozen")
    return built_in or (isinstance(origin, str) and origin.startswith(FOLDERS))
