"""Restoration of generic classes, which clients send with bases that have lost their type parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


def with_parameters(bases: Iterable[Any]) -> tuple[Any, ...]:
    """Return `bases` with a parameter for `Generic`: no class can derive from `Generic` without one.

    The class gets its own parameters afterwards, with its attributes.
    """
    return tuple(Generic[_T] if base is Generic else base for base in bases)
