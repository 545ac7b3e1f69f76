"""Envoys of modules with a submodule named like an Envoy attribute, in nnsight 0.6 and 0.7.

The attribute is then the submodule, such as `output` of RWKV's attention, and the value is `nns_output`.
nnsight creates a class for such an Envoy, and sends it with every request as the source of its methods.
That source cannot run, because it names decorators that are not sent. The server's own class replaces it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle
from nnsight.intervention.envoy import Envoy

CLOUD = "cloudpickle.cloudpickle"
MAKE, FILL = "_make_skeleton_class", "_class_setstate"
"""Functions of cloudpickle that rebuild a class which was sent by value."""

_SUFFIX = ".Preserved"
_PREFIX = "nns_"
_VALUES = ("output", "input", "inputs", "source")
"""Attributes that a submodule may hide. Only these get an `nns_` name: policies deny attributes by name."""

_own_classes: list[type] = []


def making(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `make` to return the server's class in place of a class for such Envoys."""

    @functools.wraps(make)
    def make_class(metaclass: Any, name: str, bases: Any, *others: Any) -> Any:
        if _is_of_envoy(name, bases):
            return _class_of(bases[0])
        return make(metaclass, name, bases, *others)

    return make_class


def filling(fill: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fill` to leave the server's classes unchanged."""

    @functools.wraps(fill)
    def fill_class(cls: Any, state: Any) -> Any:
        return cls if any(cls is own for own in _own_classes) else fill(cls, state)

    return fill_class


def _is_of_envoy(name: Any, bases: Any) -> bool:
    if not isinstance(bases, tuple) or len(bases) != 1:
        return False
    [base] = bases
    if not (isinstance(base, type) and issubclass(base, Envoy)):
        return False
    module = sys.modules.get(base.__module__)
    is_nnsights = base.__module__.startswith("nnsight.") and vars(module).get(base.__name__) is base
    return is_nnsights and name == base.__name__ + _SUFFIX


@functools.cache
def _class_of(base: type) -> type:
    """Return the class for Envoys with such submodules, derived from `base`."""
    cls = type(base.__name__ + _SUFFIX, (base,), {"__module__": base.__module__})
    for name in _VALUES:
        value = inspect.getattr_static(base, name)
        setattr(cls, _PREFIX + name, value)
        setattr(cls, name, _part_property(name, value))
    _own_classes.append(cls)
    return cls


def _part_property(name: str, value: Any) -> property:
    def read(envoy: Any) -> Any:
        own = vars(envoy)
        return own[name] if name in own else value.__get__(envoy, type(envoy))

    return property(read, lambda envoy, new: value.__set__(envoy, new))


setattr(cloudpickle, MAKE, making(getattr(cloudpickle, MAKE)))
setattr(cloudpickle, FILL, filling(getattr(cloudpickle, FILL)))
