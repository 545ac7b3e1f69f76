"""Inspection of classes and of `super()` that a user's class or metaclass cannot override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

_BOUND: Any = super.__dict__["__self__"]
_BOUND_AS: Any = super.__dict__["__self_class__"]
_AFTER: Any = super.__dict__["__thisclass__"]


def bases(cls: type) -> tuple[type, ...]:
    """Return the method resolution order of a class, from the class itself on."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    return found


def content(cls: type) -> Mapping[str, Any]:
    """Return the attributes that the class itself defines."""
    found: Mapping[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return found


def class_name(cls: type) -> str:
    """Return the name of a class."""
    found: str = type.__dict__["__name__"].__get__(cls)
    return found


def home(cls: type) -> str:
    """Return the module that a class names as its own; a user's class may name any, or none."""
    found = type.__dict__["__module__"].__get__(cls)
    return found if type(found) is str else ""


def full_name(cls: type) -> str:
    """Return module and qualified name ("torch.Tensor")."""
    return f"{home(cls)}.{type.__dict__['__qualname__'].__get__(cls)}"


def searched(cls: type) -> tuple[type, ...]:
    """Return the classes in which Python looks for an attribute of the class itself."""
    return (*bases(cls), *bases(type(cls)))


def definer(classes: tuple[type, ...], name: str) -> type | None:
    """Return the first class that defines `name`; None if none does or it is computed on access."""
    return next((each for each in classes if name in content(each)), None)


def bound(value: super) -> Any:
    """Return the object that a `super()` is bound to, even for a subclass of `super`."""
    return _BOUND.__get__(value)


def bound_as(value: super) -> type | None:
    """Return the class by which a `super()` treats its object; the object's `__class__` may differ."""
    found: type | None = _BOUND_AS.__get__(value)
    return found


def remaining(value: super) -> tuple[type, ...]:
    """Return the classes in which a bound `super()` looks for an attribute."""
    cls = bound_as(value)
    if cls is None:
        return ()
    order, after = bases(cls), _AFTER.__get__(value)
    at = next((number for number, each in enumerate(order) if each is after), len(order))
    return order[at + 1 :]


T = TypeVar("T")


class PerClassCache(Generic[T]):
    """A cache of a function of a class, filled when the class is first met."""

    def __init__(self, find: Callable[[type], T]) -> None:
        self._find = find
        self._found: dict[int, T] = {}
        self._kept: list[type] = []
        """Keeps each class alive: a new class may reuse the id of a deleted one."""

    def __getitem__(self, cls: type) -> T:
        number = id(cls)
        if number in self._found:
            return self._found[number]
        found = self._find(cls)
        self._kept.append(cls)
        self._found[number] = found
        return found


class ClassSet:
    """A set of classes by identity: a metaclass may define `__eq__` and `__hash__`."""

    def __init__(self) -> None:
        self._classes: dict[int, type] = {}

    def add(self, cls: type) -> None:
        """Add a class and keep it alive."""
        self._classes[id(cls)] = cls

    def __contains__(self, cls: type) -> bool:
        return id(cls) in self._classes
