"""What payloads have in common is read once, and used where it is the same and means the same."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ndif.sandbox.protector import Protector
from ndif.sandbox.protector.passages import frames, longest
from ndif.sandbox.protector.unpickling import SafeUnpickler

PARTS = 400


class Server:
    """A thing of the server's, that payloads refer to."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(file, protocol=4)
        self._names = names

    def persistent_id(self, value: Any) -> str | None:
        """By name, what is the server's."""
        return self._names.get(id(value))


OBJECTS = {f"Module:{number}": Server() for number in range(PARTS)}


def payload(*before: Any, tree: Any = None, after: Any = None) -> bytes:
    """As nnsight sends them: something, a tree that names the server's things, and more."""
    names = {id(value): name for name, value in OBJECTS.items()}
    tree = made_tree() if tree is None else tree
    file = io.BytesIO()
    _Pickler(file, names).dump({"before": before, "tree": {"parts": tree}, "after": after})
    return file.getvalue()


def made_tree() -> list[Any]:
    shared: dict[str, Any] = {"path": "shared"}
    return [
        {"path": f"layers.{number}", "module": OBJECTS[f"Module:{number}"], "shared": shared}
        for number in range(PARTS)
    ]


class Loads:
    """A Protector that has foreseen a payload, and counts the things of the server's that it looks up."""

    def __init__(self, first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self._protector = Protector()
        self.looked_up = 0
        with self._protector.foreseeing():
            self(first)
        look_up = SafeUnpickler.persistent_load

        def counted(unpickler: SafeUnpickler, pid: Any) -> Any:
            self.looked_up += 1
            return look_up(unpickler, pid)

        monkeypatch.setattr(SafeUnpickler, "persistent_load", counted)

    def __call__(self, content: bytes, objects: dict[str, Any] | None = None) -> Any:
        held = self._protector.objects(OBJECTS if objects is None else objects)
        self.looked_up = 0
        return self._protector.unpickler(pickle.Unpickler, {})(io.BytesIO(content), held).load()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Loads]:
    return lambda first: Loads(first, monkeypatch)


def test_what_is_the_same_is_read_once(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("rehearsal"))
    found = load(payload("a request", after=3))
    assert load.looked_up == 0
    assert found["before"] == ("a request",)
    assert found["after"] == 3
    parts = found["tree"]["parts"]
    assert [part["path"] for part in parts] == [f"layers.{number}" for number in range(PARTS)]
    assert all(part["module"] is OBJECTS[f"Module:{n}"] for n, part in enumerate(parts))
    assert len({id(part["shared"]) for part in parts}) == 1


def test_what_comes_later_may_refer_to_it(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("rehearsal"))
    tree = made_tree()
    found = load(payload("a request", tree=tree, after=[tree[7], tree[9]["shared"], tree]))
    assert load.looked_up == 0
    parts = found["tree"]["parts"]
    assert found["after"][0] is parts[7]
    assert found["after"][1] is parts[9]["shared"]
    assert found["after"][2] is parts


def test_what_it_makes_is_for_one_payload(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("rehearsal"))
    first = load(payload("a request"))
    second = load(payload("a request"))
    assert load.looked_up == PARTS
    assert first == second
    assert first["tree"]["parts"][0] is not second["tree"]["parts"][0]


def test_frames_are_no_part_of_it(loads: Callable[[bytes], Loads]) -> None:
    first, second = payload("rehearsal"), payload("r" * 30_000, "s" * 30_000)
    assert len(frames(first)) == 1
    assert len(frames(second)) == 2
    span = longest(second)
    assert span is not None
    assert span.start < frames(second)[1] < span.end
    load = loads(first)
    found = load(second)
    # Two things are numbered before it where there was one: it is another.
    assert load.looked_up == PARTS
    load = loads(payload("x", "y"))
    assert load(second) == found
    assert load.looked_up == 0


def _other_tree() -> bytes:
    tree = made_tree()
    tree[-1]["path"] = "layers.x"
    return payload("a request", tree=tree)


OTHERS = {
    "another tree": _other_tree(),
    "more before it": payload("a request", "more"),
    "a copy of it in a text": payload("a request", tree=[], after=payload().decode("latin-1")),
    "the end is missing": payload("a request")[:-200],
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS.keys())
def test_what_is_not_the_same_is_read(
    loads: Callable[[bytes], Loads], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(load: Callable[[bytes], Any]) -> Any:
        try:
            return load(content)
        except Exception as error:
            return type(error), str(error)

    plain = Protector()
    expected = outcome(
        lambda given: plain.unpickler(pickle.Unpickler, {})(
            io.BytesIO(given), plain.objects(OBJECTS)
        ).load()
    )
    assert outcome(loads(payload("rehearsal"))) == expected


def test_objects_that_are_others_are_looked_up(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("rehearsal"))
    others = {name: Server() for name in OBJECTS}
    found = load(payload("a request"), others)
    assert load.looked_up == PARTS
    assert found["tree"]["parts"][5]["module"] is others["Module:5"]


def test_words_that_mean_something_else_are_read(loads: Callable[[bytes], Loads]) -> None:
    """The passage refers to what was numbered before it: the same bytes may mean another thing."""

    def with_word(word: str) -> bytes:
        tree = made_tree()
        return payload(word, tree=[{**part, "word": word} for part in tree])

    load = loads(with_word("first"))
    assert load(with_word("other"))["tree"]["parts"][3]["word"] == "other"
    assert load.looked_up == PARTS
    assert load(with_word("first"))["tree"]["parts"][3]["word"] == "first"
    assert load.looked_up == 0


def test_a_call_is_no_passage() -> None:
    assert longest(payload(tree=[complex(1, 2), *made_tree()])) is None


def test_little_is_read_as_it_comes() -> None:
    assert longest(payload(tree=[1, 2, 3])) is None
