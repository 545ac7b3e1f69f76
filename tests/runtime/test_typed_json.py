"""Typed values survive JSON, and other JSON is rejected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import pytest

from ndif.runtime.typed_json import from_json, to_json


class Colour(str, Enum):
    """A value of an enumeration."""

    RED = "red"


class Pair(NamedTuple):
    """A value that JSON writes as a list."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Inner:
    """A value in a value."""

    count: int
    sizes: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    """A value with a field of each type."""

    text: str
    share: float
    is_on: bool
    colour: Colour
    mode: Literal["on", "off"]
    inner: Inner | None
    pairs: tuple[Pair, ...]
    either: Inner | Pair
    foreign: Any = None


VALUE = Outer(
    text="a",
    share=0.5,
    is_on=True,
    colour=Colour.RED,
    mode="on",
    inner=Inner(3, {0: 1, 10: 2}),
    pairs=(Pair("b", 1.0),),
    either=Pair("c", 2.0),
    foreign={"any": [1, None]},
)
FIELDS = json.loads(to_json(VALUE))


def test_value_survives_json_round_trip() -> None:
    assert from_json(Outer, to_json(VALUE)) == VALUE


def test_missing_field_gets_default_and_unknown_field_is_ignored() -> None:
    assert from_json(Inner, '{"count": 1, "more": 2}') == Inner(1)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("text", wrong) for wrong in (None, 1, ["a"])),
        *(("share", wrong) for wrong in (None, True, "0.5", 10**400)),
        *(("is_on", wrong) for wrong in (None, 1, "true")),
        *(("colour", wrong) for wrong in (None, "blue", ["red"])),
        *(("mode", wrong) for wrong in (None, "dim", ["on"])),
        *(("inner", wrong) for wrong in ({}, [], {"count": 1.0}, {"count": True})),
        *(("inner", {"count": 1, "sizes": wrong}) for wrong in ([], {"a": 1}, {"0": "1"})),
        *(("pairs", wrong) for wrong in (None, {}, [["b"]], [["b", 1.0, 2.0]], [[1, 1.0]])),
        *(("either", wrong) for wrong in ("c", {}, ["c"])),
    ],
)
def test_value_of_wrong_type_is_rejected(name: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=rf"\$\.{name}\b"):
        from_json(Outer, json.dumps({**FIELDS, name: wrong}))


@pytest.mark.parametrize("text", ["", "1", "[]", "null", "{}", "{", '{"share": NaN}'])
def test_malformed_text_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of JSON or of this reader
        from_json(Outer, text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_non_finite_number_is_rejected(number: str) -> None:
    text = to_json(VALUE).decode().replace("0.5", number)
    with pytest.raises(ValueError, match=r"malformed|out of range"):
        from_json(Outer, text)


class Sentence(str):
    """A str subclass with an attribute."""

    limit: str


class Count(int):
    """An int subclass."""


def test_subclasses_of_str_and_int_are_written_as_base_types() -> None:
    assert json.loads(to_json({"a": [Sentence("late"), Count(3)]})) == {"a": ["late", 3]}


def test_lone_surrogates_are_replaced() -> None:
    written = to_json({"half": "a\ud800", "large": 10**30, "value": VALUE})
    assert json.loads(written) == {"half": "a?", "large": 10**30, "value": FIELDS}
