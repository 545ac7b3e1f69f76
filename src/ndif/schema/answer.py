"""Answers: the typed values that operations return and routes send.

An answer is a frozen dataclass. The server builds answers without validation. pydantic generates the
OpenAPI schema, writes the JSON, and validates answers that come from another process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

from pydantic import ConfigDict, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema
from typing_extensions import dataclass_transform

T = TypeVar("T")

JsonObject = dict[str, Any]
"""A JSON object: a part of an OpenAPI document, an example, or a body for another service."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def answer(*, example: Any = None) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class an answer; `example` is its JSON in the OpenAPI document.

    A docstring below an attribute is its description in that document, also in subclasses. The document
    lists every field. Readers ignore unknown fields, which a later version may send.
    """
    shown: JsonObject = {"additionalProperties": False}
    if example is not None:
        shown["examples"] = [example]

    def decorate(cls: type[T]) -> type[T]:
        decorated = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        decorated.__pydantic_config__ = ConfigDict(  # type: ignore[attr-defined]
            extra="ignore",
            use_attribute_docstrings=True,
            json_schema_extra=shown,
        )
        bases = [base for base in cls.__mro__[1:] if "__pydantic_config__" in vars(base)]
        if bases:
            decorated.__get_pydantic_json_schema__ = partial(_inherit, bases[0])  # type: ignore[attr-defined]
        return decorated

    return decorate


def _inherit(base: type[Any], core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
    """Return an answer's JSON Schema with inherited descriptions, which pydantic leaves out."""
    schema = handler(core)
    properties = handler.resolve_ref_schema(schema)["properties"]
    for name, inherited in adapter(base).json_schema()["properties"].items():
        if "description" in inherited:
            properties[name].setdefault("description", inherited["description"])
    return schema


def project(kind: type[T], of: Any, **others: Any) -> T:
    """Return an answer of type `kind` with the fields of `of`; `others` override them."""
    names = [field.name for field in fields(kind) if field.name not in others]  # type: ignore[arg-type]
    same = {name: getattr(of, name) for name in names if hasattr(of, name)}
    return kind(**same, **others)


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}
_BUILDING = threading.RLock()
"""Held while an adapter is built: before Python 3.11.9, two threads must not parse source code at once."""


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return pydantic's reader and writer of a type; build it at the first use."""
    cached = _ADAPTERS.get(kind)
    if cached is None:
        with _BUILDING:
            cached = _ADAPTERS[kind] = TypeAdapter(kind)
    return cached


def to_json(value: Any) -> bytes:
    """Return an answer as JSON."""
    return adapter(type(value)).dump_json(value, by_alias=True)


def from_json(kind: type[T], content: bytes) -> T:
    """Return the answer in JSON; raise a `pydantic.ValidationError` if it is invalid."""
    return adapter(kind).validate_json(content)


def to_plain(value: Any) -> Any:
    """Return an answer as the dicts, lists, numbers and strings of its JSON."""
    return adapter(type(value)).dump_python(value, mode="json", by_alias=True)


def from_plain(kind: type[T], content: Any) -> T:
    """Return the answer in dicts, lists, numbers and strings.

    Raises:
        pydantic.ValidationError: If the content is not an answer of this type.
    """
    return adapter(kind).validate_python(content)
