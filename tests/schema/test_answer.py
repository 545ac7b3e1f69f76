"""Answers as dataclasses, as JSON and in a JSON Schema."""

from __future__ import annotations

import enum
import json
from dataclasses import FrozenInstanceError

import pytest
from pydantic import ValidationError

from ndif.schema.answer import adapter, answer, from_plain, to_json, to_plain

pytestmark = pytest.mark.unit


class Level(enum.Enum):
    HOT = "HOT"


@answer()
class Memory:
    """Memory of a machine."""

    bytes: int
    free_bytes: int | None = None
    """Bytes that nothing uses."""


@answer(example={"name": "gpu-1"})
class Machine:
    """A machine."""

    name: str
    level: Level
    memory: list[Memory]


MACHINE = Machine(name="one", level=Level.HOT, memory=[Memory(bytes=3)])
JSON = b'{"name":"one","level":"HOT","memory":[{"bytes":3,"free_bytes":null}]}'


def test_json_keeps_order_of_fields() -> None:
    assert to_json(MACHINE) == JSON
    assert from_plain(Machine, json.loads(JSON)) == MACHINE
    assert to_plain(MACHINE)["level"] == "HOT"


@pytest.mark.parametrize(
    "content", ["{}", JSON.replace(b'"bytes":3', b'"bytes":"3x"'), JSON.replace(b"name", b"names")]
)
def test_invalid_answer_is_rejected(content: bytes | str) -> None:
    with pytest.raises(ValidationError):
        from_plain(Machine, json.loads(content))


def test_unknown_fields_of_later_version_are_ignored() -> None:
    assert from_plain(Machine, {**json.loads(JSON), "later": 1}) == MACHINE


def test_answer_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        MACHINE.name = "two"  # type: ignore[misc]


def test_schema_contains_descriptions_and_example() -> None:
    schema = adapter(Machine).json_schema()
    assert schema["description"] == "A machine."
    assert schema["examples"] == [{"name": "gpu-1"}]
    memory = schema["$defs"]["Memory"]
    assert memory["properties"]["free_bytes"]["description"] == "Bytes that nothing uses."
    assert memory["additionalProperties"] is False


@answer()
class Gpu(Memory):
    """Memory of a GPU."""

    uuid: str


def test_answer_inherits_descriptions_of_base() -> None:
    properties = adapter(Gpu).json_schema()["properties"]
    assert properties["free_bytes"]["description"] == "Bytes that nothing uses."
