"""Typed values as JSON: dataclasses, written as objects and checked field by field when they are read.

Untrusted code may have written the JSON. Nothing here needs a library, so each process can read at once;
a model of pydantic, where a process has one, reads and writes itself.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

Reader = Callable[[Any], Any]
"""Makes a value of its type of parsed JSON, or raises ValueError."""

_LARGEST = 1 << 63
"""Bound of numbers: JSON has integers that no float holds."""


def to_json(value: Any) -> bytes:
    """Return a typed value as JSON."""
    return json.dumps(value, default=to_fields).encode()


def to_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or of a model of pydantic, by name."""
    if hasattr(value, "model_dump"):
        fields_of_model: dict[str, Any] = value.model_dump(mode="json", by_alias=True)
        return fields_of_model
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


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
    types = (int, float) if kind is float else (kind,)
    if kind in (int, float):
        return lambda value: _require(value, type(value) in types and -_LARGEST < value < _LARGEST)
    return lambda value: _require(value, type(value) is kind)


def _object_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    known = {each.name: reader(hints[each.name]) for each in fields(kind)}
    required = [
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    ]

    def read(value: Any) -> Any:
        if type(value) is not dict or not all(name in value for name in required):
            raise ValueError(f"it is no {kind.__name__}, or lacks a part of one")
        found = {}
        for name in known.keys() & value.keys():
            try:
                found[name] = known[name](value[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
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


def _require(value: Any, is_valid: bool) -> Any:
    if not is_valid:
        raise ValueError("it has another type, or is out of range")
    return value
