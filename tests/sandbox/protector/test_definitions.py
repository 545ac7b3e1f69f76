"""User classes, sent by value or made in a block, behave as on the client."""

# ruff: noqa: E501 - one use per line

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from nnsight.intervention import serialization

from ndif.runtime.generations.v08 import Nnsight08, _Unpickler
from tests.sandbox.protector import users_classes
from tests.sandbox.protector.running import guarded, protector

CLASSES = {
    name: value
    for name, value in vars(users_classes).items()
    if isinstance(value, type) and value.__module__ == users_classes.__name__
}
OBJECTS = {
    "box": users_classes.Box[int](3),
    "sub": users_classes.Sub(2),
    "pack": users_classes.Pack([1, 2]),
    "plan": users_classes.Plan((3,), note="a"),
    "half": users_classes.Half(),
    "given": users_classes.Given("abc"),
    "pair": users_classes.Pair(1.0),
    "point": users_classes.Point(1),
    "concrete": users_classes.Concrete(),
    "kind": users_classes.Kind.NORM,
    "flags": users_classes.Flags.A | users_classes.Flags.B,
    "numbers": users_classes.Numbers([4, 5]),
    "store": users_classes.Store(a=1),
    "maker": users_classes.Maker(),
}

USES: dict[str, str] = {
    "Generic": "Box(3).doubled(), Box[int](3).value, Box.size, box.doubled(), isinstance(box, Box)",
    "a subclass of one": "Sub(2).tripled() + Sub(2).doubled(), sub.tripled(), isinstance(sub, Box)",
    "several parameters": "Two(1).key('a'), Two[int, str](2).doubled()",
    "aliases": "Numbers([4, 5]).first(), numbers.first(), Table(a=1, b=2).total(), Plain(a=[1, 2]).longest()",
    "dataclasses": "Pack([1, 2]).total(), pack.total(), Pack().items, Wide([1]).width, Wide([1], 3).total()",
    "frozen dataclasses": "list(Plan().table), plan.note, plan < Plan((4,)), plan == Plan((3,), 'a'), len({plan})",
    "Protocol": "Half().scale(4), half.scale(4), isinstance(half, Scales), isinstance(Other(), Scales), isinstance(3, Scales), issubclass(Half, Scales)",
    "Protocol with parameters": "given.get(), Given('ab').name, issubclass(Given, Given)",
    "NamedTuple": "Pair(1.0).b, Pair(1, 3).total(), pair.total(), pair._replace(a=5).a, Pair._fields, list(pair._asdict())",
    "namedtuple": "Point(1).y, point.x, Point(1, 2)._replace(x=3).x, Point._make([1, 2]).y",
    "TypedDict": "Options(a=1)['a'], More(a=1, b='c')['b'], sorted(More(a=1))",
    "ABC": "Concrete().go(2), concrete.go(2), concrete.name, isinstance(concrete, Base)",
    "an abstract Generic": "Maker().make(), maker.make(), isinstance(maker, Typed)",
    "a metaclass": "isinstance(Registered(), Registered), issubclass(Other, Registered), issubclass(Half, Registered), Registered.made",
    "Enum": "Colour.BLUE.value, Colour['RED'].value, Colour.RED.short, [each.name for each in Colour], Colour((1, 2)) is Colour.BLUE",
    "Enum of another class": "Kind('mean') is Kind.MEAN, kind.of(2), kind == 'norm', kind.upper(), {Kind.MEAN: 1}['mean'], isinstance(kind, str)",
    "IntEnum": "Level.HIGH > 1, Level(2).name",
    "Flag": "(Flags.A | Flags.B).value, Flags.A in flags, (Bits.A | 4).value, ~Flags.A == Flags.B",
    "others": "store['b'], Store(b=2)['b'], Ordered(1) >= Ordered(0), max(Ordered(1), Ordered(2)).rank, Slotted(1).a",
}


@pytest.fixture(scope="module")
def sent() -> dict[str, Any]:
    """The classes and objects, sent by a client of nnsight 0.8 and received by a block."""
    cloudpickle.register_pickle_by_value(users_classes)
    try:
        content = serialization.dumps([CLASSES, OBJECTS])
    finally:
        cloudpickle.unregister_pickle_by_value(users_classes)
    policy = protector()
    with Nnsight08()._guarding(policy):
        classes, objects = _Unpickler(policy, io.BytesIO(content), {})._unpickler.load()
    assert not {*map(id, classes.values())} & {*map(id, CLASSES.values())}
    return {**classes, **objects}


def at_home(use: str) -> list[str]:
    return [*map(repr, eval(f"[{use}]", {**CLASSES, **OBJECTS}))]


@pytest.mark.parametrize("name", USES)
def test_sent_class_behaves_as_on_client(name: str, sent: dict[str, Any]) -> None:
    use = USES[name]
    results = guarded(f"found = [{use}]", **sent)["found"]
    assert [*map(repr, results)] == at_home(use)


SOURCE = Path(users_classes.__file__).read_text()
MADE = """
box, sub, pack, plan, half, given = Box[int](3), Sub(2), Pack([1, 2]), Plan((3,), note="a"), Half(), Given("abc")
pair, point, concrete = Pair(1.0), Point(1), Concrete()
kind, flags, numbers, store, maker = Kind.NORM, Flags.A | Flags.B, Numbers([4, 5]), Store(a=1), Maker()
"""


@pytest.fixture(scope="module", params=["", "from __future__ import annotations\n"])
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The same classes and objects, made in a block."""
    return guarded(request.param + SOURCE + MADE)


@pytest.mark.parametrize("name", USES)
def test_class_made_in_block_behaves_as_on_client(name: str, made: dict[str, Any]) -> None:
    use = USES[name]
    scope = {key: value for key, value in made.items() if key != "__builtins__"}
    results = guarded(f"found = [{use}]", **scope)["found"]
    assert [*map(repr, results)] == at_home(use)


ERRORS = {
    "TypeError: Can't instantiate abstract class Base": "Base()",
    "TypeError: Protocols cannot be instantiated": "Scales()",
    "TypeError: Instance and class checks can only be used with @runtime_checkable": "isinstance(given, Named)",
    "ValueError: 'x' is not a valid Kind": "Kind('x')",
    "FrozenInstanceError: cannot assign to field 'note'": "setattr(plan, 'note', 'b')",
}


def errors(scope: dict[str, Any]) -> Iterator[str]:
    for expected, use in ERRORS.items():
        try:
            guarded(use, **{key: value for key, value in scope.items() if key != "__builtins__"})
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if not text.startswith(expected):
                yield text
        else:
            yield f"no {expected}"


def test_class_errors_equal_those_on_client(sent: dict[str, Any], made: dict[str, Any]) -> None:
    assert [*errors(sent)] == []
    assert [*errors(made)] == []
