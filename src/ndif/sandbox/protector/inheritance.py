"""Inspection of classes and of `super()` that a user's class or metaclass cannot override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

bases: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""The method resolution order of a class, from the class itself on."""

content: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
"""The attributes that a class itself defines."""

class_name: Callable[[type], str] = type.__dict__["__name__"].__get__
"""The name of a class."""

bound: Callable[[super], Any] = super.__dict__["__self__"].__get__
"""The object that a `super()` is bound to, even for a subclass of `super`."""

bound_as: Callable[[super], type | None] = super.__dict__["__self_class__"].__get__
"""The class by which a `super()` treats its object; the object's `__class__` may differ."""

_after: Callable[[super], type] = super.__dict__["__thisclass__"].__get__


def home(cls: type) -> str:
    """Return the module that a class names as its own, or ""; a user's class may name any."""
    module = type.__dict__["__module__"].__get__(cls)
    return module if type(module) is str else ""


def full_name(cls: type) -> str:
    """Return module and qualified name ("torch.Tensor")."""
    return f"{home(cls)}.{type.__dict__['__qualname__'].__get__(cls)}"


def searched(cls: type) -> tuple[type, ...]:
    """Return the classes in which Python looks for an attribute of the class itself."""
    return (*bases(cls), *bases(type(cls)))


def definer(classes: tuple[type, ...], name: str) -> type | None:
    """Return the first class that defines `name`; None if none does or it is computed on access."""
    return next((cls for cls in classes if name in content(cls)), None)


def remaining(value: super) -> tuple[type, ...]:
    """Return the classes in which a bound `super()` looks for an attribute."""
    cls = bound_as(value)
    if cls is None:
        return ()
    order, after = bases(cls), _after(value)
    index = next((number for number, base in enumerate(order) if base is after), len(order))
    return order[index + 1 :]


T = TypeVar("T")


class PerClassCache(Generic[T]):
    """A cache of a function's result for each class."""

    def __init__(self, find: Callable[[type], T]) -> None:
        self._find = find
        self._results: dict[int, T] = {}
        self._kept: list[type] = []
        """Keeps each class alive: a new class may reuse the id of a deleted one."""

    def __getitem__(self, cls: type) -> T:
        number = id(cls)
        if number not in self._results:
            result = self._find(cls)
            # Append first: otherwise the entry might later be used for another class.
            self._kept.append(cls)
            self._results[number] = result
        return self._results[number]
