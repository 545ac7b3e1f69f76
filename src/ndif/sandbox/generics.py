"""Generic classes that a client sends with the bases that Python computed, and without their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


def with_parameters(bases: Iterable[Any]) -> tuple[Any, ...]:
    """Return the bases of a class with a parameter for `Generic`, which no class derives from without one.

    The class's own parameters are among the attributes that it gets afterwards.
    """
    return tuple(Generic[_T] if base is Generic else base for base in bases)
