"""Libraries that call what a text names, made to look at the name first.

pandas takes `agg("mean")` for a method, and `agg("to_csv")` too; `copy` calls what an object says makes
another like it, and sets of that what the object says. No guard of a block's sees it; these do. They stand
in this process for whoever calls, and mind only what a block brings about.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from typing import Any

from ndif.sandbox.protector.transformer import private
from ndif.sandbox.protector.whitelist import Whitelist

_ATTRIBUTES = ("agg", "aggregate", "apply", "filter")
"""Of pandas' groups: the methods that take another's name."""

_GROUPS = ("SeriesGroupBy", "DataFrameGroupBy")


def guard_pandas(whitelist: Whitelist) -> None:
    """Have every method that a text names looked at."""
    if "pandas.core.apply" in sys.modules:
        apply: Any = sys.modules["pandas.core.apply"]
        if getattr(apply.Apply._apply_str, "guarded", False):
            return
    else:
        apply = importlib.import_module("pandas.core.apply")

    def check(value: Any, name: str) -> None:
        reason = "it is private" if private(name) else whitelist.of_class(type(value)).get(name)
        if reason is None and not hasattr(value, name):
            # pandas looks for a function of numpy's instead.
            reason = whitelist.modules["numpy"].reason(f"numpy.{name}")
        if reason is not None:
            raise AttributeError(
                f"{type(value).__name__}.{name} is not available on this server: {reason}"
            )

    named = apply.Apply._apply_str

    def apply_str(self: Any, obj: Any, func: str, *arguments: Any, **options: Any) -> Any:
        check(obj, func)
        return named(self, obj, func, *arguments, **options)

    apply_str.guarded = True  # type: ignore[attr-defined]
    apply.Apply._apply_str = apply_str
    generic: Any = importlib.import_module("pandas.core.groupby.generic")
    for group in _GROUPS:
        kind = getattr(generic, group)
        for name in _ATTRIBUTES:
            setattr(kind, name, _checking(getattr(kind, name), check))
    plotting: Any = importlib.import_module("pandas.plotting._core")
    plotting._load_backend = _no_backend


def _checking(method: Callable[..., Any], check: Callable[[Any, str], None]) -> Callable[..., Any]:
    def checked(self: Any, func: Any = None, *arguments: Any, **options: Any) -> Any:
        if isinstance(func, str):
            check(self, func)
            # `filter` asks the groups themselves.
            check(self.obj, func)
        return method(self, func, *arguments, **options)

    checked.__name__ = method.__name__
    checked.__doc__ = method.__doc__
    return checked


def _no_backend(backend: str) -> None:
    raise ImportError("plots cannot be made on this server: what makes them is a module")


def guard_copying(owns: Callable[[Any], bool]) -> None:
    """Have `copy` make of a user's object only another of the user's: `owns` says what is theirs."""
    _owners.append(owns)
    module: Any = copy
    module._reconstruct = _reconstruct


_owners: list[Callable[[Any], bool]] = []
_original: Callable[..., Any] = copy._reconstruct  # type: ignore[attr-defined]


def _reconstruct(x: Any, memo: Any, func: Any, arguments: Any, *rest: Any, **options: Any) -> Any:
    if not _owned(x):
        return _original(x, memo, func, arguments, *rest, **options)

    def made(*given: Any) -> Any:
        value = func(*given)
        if not _owned(value):
            raise TypeError(
                f"an object of the class {type(x).__name__!r} cannot be copied: what its __reduce_ex__ "
                "names makes an object that is not yours"
            )
        return value

    return _original(x, memo, made, arguments, *rest, **options)


def _owned(value: Any) -> bool:
    return any(owns(value) for owns in _owners)
