"""Paths as data: a block may split and join paths of the user's machine, but cannot open them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn


class _Unavailable:
    """An attribute of `pathlib.Path` that uses the file system."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, value: Any, cls: type) -> NoReturn:
        raise AttributeError(
            f"{cls.__name__}.{self._name} is not available on this server: the path belongs to your "
            "machine. Read or write the file there, and use its content in the block"
        )


def _as_data(name: str, pure: type[PurePath]) -> Any:
    """Return a block's replacement of a class of paths that can be opened."""

    def reduce(self: PurePath) -> tuple[Callable[..., Any], tuple[str, ...]]:
        # The user's process gets back a path of the class that it sent.
        return getattr(pathlib, name), self.parts

    def itself(self: PurePath, *_: object) -> PurePath:
        return self

    unavailable = {
        attribute: _Unavailable(attribute)
        for attribute in dir(pathlib.Path)
        if not attribute.startswith("_") and not hasattr(PurePath, attribute)
    }
    # A copy made by `__reduce__` would be a path that can be opened.
    methods = {"__reduce__": reduce, "__copy__": itself, "__deepcopy__": itself}
    return type(name, (pure,), {"__module__": "pathlib", **unavailable, **methods})


_POSIX = _as_data("PosixPath", PurePosixPath)

CLASSES: dict[str, Any] = {
    "PurePath": PurePath,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "Path": _POSIX,
    "PosixPath": _POSIX,
    "WindowsPath": _as_data("WindowsPath", PureWindowsPath),
}
"""The classes of `pathlib` as a block has them, by their names."""
