"""Typed values as JSON: dataclasses, written as objects and checked field by field when they are read.

Untrusted code may have written the JSON. Nothing here needs a library, so each process can read at once;
a model of pydantic, where a process has one, reads and writes itself.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

Reader = Callable[[Any], Any]
"""Makes a value of its type of parsed JSON, or raises ValueError."""

_LARGEST = 1 << 63
"""Bound of integers: JSON has some that no float holds."""


def to_json(value: Any) -> bytes:
    """Return a typed value as JSON."""
    return _ENCODER.encode(value).encode()


def to_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or of a model of pydantic, by name."""
    names = getattr(value, "__dataclass_fields__", None)
    if names is None:
        found: dict[str, Any] = value.model_dump(mode="json", by_alias=True)
        return found
    return {name: getattr(value, name) for name in names}


_ENCODER = json.JSONEncoder(default=to_fields)
"""One for all: `json.dumps` makes an encoder at each call that has a default."""


def from_json(kind: type[T], text: bytes | str) -> T:
    """Read a value from JSON, or raise ValueError if it is no value of this type."""
    value: T = reader(kind)(json.loads(text))
    return value


def reader(kind: Any) -> Reader:
    """Return the reader of a type; unknown fields are ignored."""
    return _reader(kind)


@functools.cache
def _reader(kind: Any) -> Reader:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object_reader(kind)
    if hasattr(kind, "model_validate"):
        return kind.model_validate  # type: ignore[no-any-return]
    if hasattr(kind, "_fields"):
        return _named_tuple_reader(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if origin in (Union, UnionType):
        return _union_reader([reader(each) for each in inner if each is not type(None)])
    if origin is Literal:
        return lambda value: _require(value, type(value) is str and value in inner)
    if origin is tuple:
        each = reader(inner[0])
        return lambda value: tuple(map(each, _require(value, type(value) is list)))
    if origin is collections.abc.Mapping:
        key = int if inner[0] is int else str
        entry = reader(inner[1])
        return lambda value: {
            key(name): entry(each) for name, each in _require(value, type(value) is dict).items()
        }
    if kind is Any:
        return lambda value: value
    if kind in (int, float):
        return _integer if kind is int else _finite
    return lambda value: _require(value, type(value) is kind)


def _object_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    # A value of the second needs no further check.
    known = [
        (each.name, hints[each.name] if hints[each.name] in (bool, str) else None)
        for each in fields(kind)
    ]
    readers = {each.name: reader(hints[each.name]) for each in fields(kind)}
    required = {
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    }

    def read(value: Any) -> Any:
        if type(value) is not dict or not required <= value.keys():
            raise ValueError(f"it is no {kind.__name__}, or lacks a part of one")
        found = {}
        for name, simple in known:
            if name not in value:
                continue
            each = value[name]
            if type(each) is not simple:
                try:
                    each = readers[name](each)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            found[name] = each
        return kind(**found)

    return read


def _union_reader(kinds: Sequence[Reader]) -> Reader:
    """Return the reader of None and of these types, of which the first that fits is taken."""
    *others, last = kinds

    def read(value: Any) -> Any:
        if value is None:
            return None
        for kind in others:
            with contextlib.suppress(ValueError):
                return kind(value)
        return last(value)

    return read


def _named_tuple_reader(kind: Any) -> Reader:
    known = [reader(each) for each in get_type_hints(kind).values()]

    def read(value: Any) -> Any:
        _require(value, type(value) is list and len(value) == len(known))
        return kind(*(read(each) for read, each in zip(known, value, strict=True)))

    return read


def _integer(value: Any) -> int:
    if type(value) is int and -_LARGEST < value < _LARGEST:
        return value
    raise ValueError("it is no number, or out of range")


def _finite(value: Any) -> float:
    return value if type(value) is float and math.isfinite(value) else _integer(value)


def _require(value: Any, is_valid: bool) -> Any:
    if not is_valid:
        raise ValueError("it has another type, or is out of range")
    return value
