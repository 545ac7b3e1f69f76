"""Answers: the typed values that operations return and routes send.

An answer is a frozen dataclass, which our own code builds without validation. pydantic describes it for
OpenAPI, writes it as JSON, and validates it where it comes from another process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def answer(*, example: Any = None) -> Callable[[type[T]], type[T]]:
    """Make a class an answer; `example` is its JSON in the OpenAPI document.

    A string below an attribute is the attribute's description there.
    """

    def decorate(cls: type[T]) -> type[T]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        made.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
            extra="forbid",
            use_attribute_docstrings=True,
            json_schema_extra=None if example is None else {"examples": [example]},
        )
        return made

    return decorate


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return pydantic's reader and writer of a type, which is built at its first use."""
    found = _ADAPTERS.get(kind)
    if found is None:
        found = _ADAPTERS[kind] = TypeAdapter(kind)
    return found


def to_json(value: Any) -> bytes:
    """Return an answer as JSON."""
    return adapter(type(value)).dump_json(value)


def to_plain(value: Any) -> Any:
    """Return an answer as dicts, lists, numbers and strings, as its JSON has them."""
    return adapter(type(value)).dump_python(value, mode="json")


def from_plain(kind: type[T], content: Any) -> T:
    """Read an answer from dicts, lists, numbers and strings.

    Raises:
        pydantic.ValidationError: If it is no answer of this kind.
    """
    return adapter(kind).validate_python(content)


def from_json(kind: type[T], content: bytes | str) -> T:
    """Read an answer from JSON.

    Raises:
        pydantic.ValidationError: If it is no answer of this kind.
    """
    return adapter(kind).validate_json(content)
