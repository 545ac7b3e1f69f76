"""What is known of classes, by which class it is: what one says that it equals is not asked.

A metaclass of a user's may say that its class equals any other, and has the same hash. In a dictionary or a
set of classes it would then be found for that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByClass(Generic[T]):
    """What a function finds of a class, asked when the class is first met."""

    def __init__(self, find: Callable[[type], T]) -> None:
        self._find = find
        self._found: dict[int, T] = {}
        self._kept: list[type] = []
        """Of one that is gone, another might have the number."""

    def __getitem__(self, cls: type) -> T:
        number = id(cls)
        if number in self._found:
            return self._found[number]
        found = self._find(cls)
        self._kept.append(cls)
        self._found[number] = found
        return found


class Classes:
    """A set of classes."""

    def __init__(self) -> None:
        self._classes: dict[int, type] = {}

    def add(self, cls: type) -> None:
        """Have it in the set for as long as that lasts."""
        self._classes[id(cls)] = cls

    def __contains__(self, cls: type) -> bool:
        return id(cls) in self._classes
