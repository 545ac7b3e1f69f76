"""Placeholders for objects that a request names and a block may not use: a use fails, not the request."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NoReturn

from ndif.sandbox.protector.names import words

_OWN = words("__class__ __reduce__ __reduce_ex__ __mro_entries__ __copy__ __deepcopy__")
"""Special methods that are looked up on an object, and must be the placeholder's."""


class Placeholder(ModuleType):
    """A module, function, class or object that is not available: each use raises ImportError.

    A placeholder holds texts only: it calls no function, and keeps no argument.
    """

    def __init__(self, path: str, why: str, prefix: str = "") -> None:
        """Stand for the object `path`; errors use the sentence `why`, and `prefix` before an instance."""
        super().__init__(path)
        object.__setattr__(self, "_why", why)
        object.__setattr__(self, "_prefix", prefix)
        object.__setattr__(self, "_variable", None)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        if name == "__dict__":
            return {}
        if name.startswith("__") and name.endswith("__"):
            # Generic code probes any object for these; a probe is not a use.
            raise AttributeError(_message(self))
        raise _error(self)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise ImportError."""
        raise _error(self)

    __setattr__ = __delattr__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = __call__

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, *_: object) -> Placeholder:
        """Return the placeholder itself, because an annotation may name a generic class with parameters."""
        if object.__getattribute__(self, "_prefix"):
            raise _error(self)
        return self

    def __or__(self, *_: object) -> Placeholder:
        """Return the placeholder itself, because an annotation may name it in a union."""
        return self.__class__.__getitem__(self)

    __ror__ = __or__

    def __repr__(self) -> str:
        prefix = object.__getattribute__(self, "_prefix")
        return f"<{prefix}{ModuleType.__getattribute__(self, '__name__')} (not available)>"

    def __reduce__(self) -> Any:
        module, _, name = ModuleType.__getattribute__(self, "__name__").partition(":")
        if object.__getattribute__(self, "_prefix"):
            raise _error(self)
        # The user's process unpickles the object that the placeholder stands for.
        if not name:
            return importlib.import_module, (module,)
        return operator.attrgetter(name), (Placeholder(module, ""),)

    # `__reduce__` serves the user's own process; a copy made by it would be the object itself.
    def __deepcopy__(self, *_: object) -> Placeholder:
        return self

    __copy__ = __deepcopy__


_USES = words("""
    __iter__ __next__ __reversed__ __len__ __contains__ __setitem__ __delitem__
    __enter__ __exit__ __aenter__ __aexit__ __aiter__ __anext__ __await__
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __matmul__ __rmatmul__ __truediv__ __rtruediv__
    __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __and__ __rand__ __xor__ __rxor__
    __lshift__ __rlshift__ __rshift__ __rrshift__ __neg__ __pos__ __abs__ __invert__
    __int__ __float__ __complex__ __index__ __lt__ __le__ __gt__ __ge__
""")
"""Special methods by which Python uses an object."""

for _name in _USES:
    setattr(Placeholder, _name, Placeholder.__call__)


def of_global(module: str, name: str, why: str) -> Placeholder:
    """Return the placeholder of a function or class of a module."""
    return Placeholder(f"{module}:{name}", why)


def of_object(maker: Placeholder) -> Placeholder:
    """Return the placeholder of an object that an unavailable class or function would have made."""
    if object.__getattribute__(maker, "_prefix"):
        return maker
    path = ModuleType.__getattribute__(maker, "__name__")
    return Placeholder(path, object.__getattribute__(maker, "_why"), "an object of ")


def module_of(value: Placeholder) -> str:
    """Return the module of the object that a placeholder stands for."""
    path: str = ModuleType.__getattribute__(value, "__name__")
    return path.partition(":")[0]


def named(value: Any, variable: str) -> Any:
    """Return a copy of a placeholder that records its variable; return any other value unchanged."""
    if type(value) is not Placeholder:
        return value
    result = Placeholder(
        ModuleType.__getattribute__(value, "__name__"),
        object.__getattribute__(value, "_why"),
        object.__getattribute__(value, "_prefix"),
    )
    object.__setattr__(result, "_variable", variable)
    return result


def check(values: Iterable[object]) -> None:
    """Raise the error of the first placeholder among some values."""
    for value in values:
        if type(value) is Placeholder:
            raise _error(value)


def placeholder_of(error: ImportError) -> Placeholder | None:
    """Return the placeholder whose use raised an error; None if the error has another cause."""
    placeholder = vars(error).get("placeholder")
    return placeholder if type(placeholder) is Placeholder else None


def _message(value: Placeholder) -> str:
    why: str = object.__getattribute__(value, "_why")
    path = ModuleType.__getattribute__(value, "__name__").replace(":", ".")
    variable = object.__getattribute__(value, "_variable")
    prefix: str = object.__getattribute__(value, "_prefix")
    if prefix:
        subject = "it" if variable else "the request"
        why = f"{subject} holds {prefix}{path}, and {why}"
    if variable and (prefix or variable != path):
        return f"the variable {variable!r} cannot be used: {why}"
    return why


def _error(value: Placeholder) -> ImportError:
    error = ImportError(_message(value))
    error.placeholder = value  # type: ignore[attr-defined]
    return error


class Discarded:
    """A container that drops its items, for an object that a placeholder has replaced."""

    def append(self, item: object) -> None:
        """Drop an item of a list."""

    def extend(self, items: object) -> None:
        """Drop items of a list."""

    def update(self, items: object) -> None:
        """Drop items of a set."""

    def __setitem__(self, key: object, value: object) -> None:
        """Drop an item of a mapping."""
