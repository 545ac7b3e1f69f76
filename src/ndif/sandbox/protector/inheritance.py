"""Where a class has an attribute from, and what a `super()` stands for.

Read past what a user's class or metaclass says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BOUND: Any = super.__dict__["__self__"]
_BOUND_AS: Any = super.__dict__["__self_class__"]
_AFTER: Any = super.__dict__["__thisclass__"]


def bases(cls: type) -> tuple[type, ...]:
    """The class itself, and all that it inherits from, in the order that Python looks at them."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    return found


def content(cls: type) -> Mapping[str, Any]:
    """What the class has itself."""
    found: Mapping[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return found


def called(cls: type) -> str:
    """What the class is called."""
    found: str = type.__dict__["__name__"].__get__(cls)
    return found


def home(cls: type) -> str:
    """The module that it says it is from: a class of the user's may say any, or what is none."""
    found = type.__dict__["__module__"].__get__(cls)
    return found if type(found) is str else ""


def full_name(cls: type) -> str:
    """Module and name ("torch.Tensor")."""
    return f"{home(cls)}.{type.__dict__['__qualname__'].__get__(cls)}"


def searched(cls: type) -> tuple[type, ...]:
    """Where an attribute of the class itself is looked for."""
    return (*bases(cls), *bases(type(cls)))


def definer(classes: tuple[type, ...], name: str) -> type | None:
    """The first that has it; None if it is made when asked for, or is not there."""
    return next((each for each in classes if name in content(each)), None)


def bound(value: super) -> Any:
    """The object that a `super()` is bound to, whatever a subclass of `super` says."""
    return _BOUND.__get__(value)


def bound_as(value: super) -> type | None:
    """The class that it takes that object for an object of: one's `__class__` may say another."""
    found: type | None = _BOUND_AS.__get__(value)
    return found


def remaining(value: super) -> tuple[type, ...]:
    """Where a bound `super()` looks for an attribute."""
    cls = bound_as(value)
    if cls is None:
        return ()
    order, after = bases(cls), _AFTER.__get__(value)
    at = next((number for number, each in enumerate(order) if each is after), len(order))
    return order[at + 1 :]
