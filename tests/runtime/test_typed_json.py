"""Typed values survive JSON, and nothing else passes for one."""

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
    """A value that JSON has as a list."""

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


def test_a_value_survives() -> None:
    assert from_json(Outer, to_json(VALUE)) == VALUE


def test_a_default_stands_for_a_field_that_is_left_out_and_an_unknown_one_is_ignored() -> None:
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
def test_nothing_else_passes_for_a_value(name: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=rf"\$\.{name}\b"):
        from_json(Outer, json.dumps({**FIELDS, name: wrong}))


@pytest.mark.parametrize("text", ["", "1", "[]", "null", "{}", "{", '{"share": NaN}'])
def test_other_text_is_no_value(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of JSON or of this reader
        from_json(Outer, text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_is_finite(number: str) -> None:
    text = to_json(VALUE).decode().replace("0.5", number)
    with pytest.raises(ValueError, match=r"malformed|out of range"):
        from_json(Outer, text)


class Sentence(str):
    """A text that knows more than its words."""

    limit: str


class Count(int):
    """A number of a library."""


def test_subclasses_of_text_and_numbers_are_written_as_what_they_are() -> None:
    assert json.loads(to_json({"a": [Sentence("late"), Count(3)]})) == {"a": ["late", 3]}


def test_text_that_no_utf_8_has_is_marked() -> None:
    written = to_json({"half": "a\ud800", "large": 10**30, "value": VALUE})
    assert json.loads(written) == {"half": "a?", "large": 10**30, "value": FIELDS}
