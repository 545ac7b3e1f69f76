"""Removes the reset between trusted requests, in each process that has this folder on its path.

Python imports this module at its start. An attack that succeeds without a reset, and fails with one, shows
that the reset stops it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WITHOUT = {
    "ndif.runtime.process.model_reset": ("ModelReset.__call__", lambda *_: None),
    "ndif.runtime.process.runner": ("_seed", lambda **_: None),
}
"""The replaced function of each module, and its replacement."""


class Finder:
    """A finder that imports these modules normally and replaces a function of each."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if name not in WITHOUT:
            return None
        path, function = WITHOUT.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            *above, attribute = path.split(".")
            owner: Any = module
            for part in above:
                owner = getattr(owner, part)
            setattr(owner, attribute, function)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
