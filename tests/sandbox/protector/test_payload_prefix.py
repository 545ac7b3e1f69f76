"""The common prefix of payloads is decoded once, and reused if bytes and references are equal."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ndif.sandbox.protector import Protector
from ndif.sandbox.protector.payload_prefix import frame_offsets, longest_container
from ndif.sandbox.protector.unpickling import SafeUnpickler

PARTS = 400


class Server:
    """A persistent object of the server."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(file, protocol=4)
        self._names = names

    def persistent_id(self, value: Any) -> str | None:
        """Return the name of an object of the server."""
        return self._names.get(id(value))


OBJECTS = {f"Module:{number}": Server() for number in range(PARTS)}


def payload(*before: Any, tree: Any = None, after: Any = None) -> bytes:
    """Return a payload like nnsight's: some objects, a tree with the server's objects, and `after`."""
    names = {id(value): name for name, value in OBJECTS.items()}
    tree = make_tree() if tree is None else tree
    file = io.BytesIO()
    _Pickler(file, names).dump({"before": before, "tree": {"parts": tree}, "after": after})
    return file.getvalue()


def make_tree() -> list[Any]:
    shared: dict[str, Any] = {"path": "shared"}
    return [
        {"path": f"layers.{number}", "module": OBJECTS[f"Module:{number}"], "shared": shared}
        for number in range(PARTS)
    ]


class Loads:
    """A Protector with the cached prefix of a payload, and a count of its lookups of persistent objects."""

    def __init__(self, first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self._protector = Protector()
        self.looked_up = 0
        with self._protector.caching_prefix():
            self(first)
        look_up = SafeUnpickler.persistent_load

        def counted(unpickler: SafeUnpickler, pid: Any) -> Any:
            self.looked_up += 1
            return look_up(unpickler, pid)

        monkeypatch.setattr(SafeUnpickler, "persistent_load", counted)

    def ahead(self) -> None:
        """Decode the prefix ahead, as a waiting process does."""
        self._protector.decode_ahead()

    def forget(self) -> None:
        """Drop the decoded prefix, as after a request that did not use it."""
        self._protector.forget_decoded()

    def __call__(self, content: bytes, objects: dict[str, Any] | None = None) -> Any:
        held = self._protector.objects(OBJECTS if objects is None else objects)
        self.looked_up = 0
        return self._protector.unpickler({})(io.BytesIO(content), held).load()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Loads]:
    return lambda first: Loads(first, monkeypatch)


def test_the_prefix_is_decoded_once(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("warm-up"))
    loaded = load(payload("a request", after=3))
    assert load.looked_up == 0
    assert loaded["before"] == ("a request",)
    assert loaded["after"] == 3
    parts = loaded["tree"]["parts"]
    assert [part["path"] for part in parts] == [f"layers.{number}" for number in range(PARTS)]
    assert all(part["module"] is OBJECTS[f"Module:{n}"] for n, part in enumerate(parts))
    assert len({id(part["shared"]) for part in parts}) == 1


def test_later_objects_may_refer_to_the_prefix(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("warm-up"))
    tree = make_tree()
    loaded = load(payload("a request", tree=tree, after=[tree[7], tree[9]["shared"], tree]))
    assert load.looked_up == 0
    parts = loaded["tree"]["parts"]
    assert loaded["after"][0] is parts[7]
    assert loaded["after"][1] is parts[9]["shared"]
    assert loaded["after"][2] is parts


def test_each_payload_gets_separate_objects(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("warm-up"))
    first = load(payload("a request"))
    first["tree"]["parts"][0]["path"] = first["tree"]["parts"][1]["shared"]["path"] = "changed"
    second = load(payload("a request"))
    assert load.looked_up == 0
    assert second["tree"]["parts"] == make_tree()


def test_prefix_may_be_decoded_ahead(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("warm-up"))
    trees = []
    for _ in range(3):
        load.ahead()
        load.ahead()  # as after a request with another tree
        loaded = load(payload("a request", "more", after="the end"))
        trees.append(loaded["tree"]["parts"])
        assert (loaded["before"], loaded["after"]) == (("a request", "more"), "the end")
        trees.append(load(payload("another"))["tree"]["parts"])
    assert load.looked_up == 0
    assert all(tree == make_tree() for tree in trees)
    parts = [part for tree in trees for part in tree]
    assert len({id(part) for part in parts}) == len(parts)
    assert len({id(part["shared"]) for part in parts}) == len(trees)


def test_pickle_frame_may_begin_within_prefix(loads: Callable[[bytes], Loads]) -> None:
    first, second = payload("warm-up"), payload("r" * 30_000, "s" * 30_000)
    assert len([*frame_offsets(first)]) == 1
    assert len([*frame_offsets(second)]) == 2
    span = longest_container(second)
    assert span is not None
    assert span.start < [*frame_offsets(second)][1] < span.end
    load = loads(first)
    assert load(second)["tree"]["parts"] == make_tree()
    # Two objects are in the memo before the prefix, not one: each number differs by one.
    assert load.looked_up == 0


@pytest.mark.parametrize("more", [1, 7, 60, 300, 33_000])
def test_objects_before_prefix_shift_its_memo_numbers(
    loads: Callable[[bytes], Loads], more: int
) -> None:
    """Memo numbers from 256 on take four bytes instead of one; each object here takes two numbers."""
    load = loads(payload("warm-up"))
    tree = make_tree()
    before = [[str(number)] for number in range(more)]
    content = payload(*before, tree=tree, after=[tree[7], tree[399]["shared"], tree])
    loaded = load(content)
    assert load.looked_up == 0
    parts = loaded["tree"]["parts"]
    assert parts == tree
    assert loaded["after"][0] is parts[7]
    assert loaded["after"][1] is parts[0]["shared"]
    assert loaded["after"][2] is parts
    assert loads(content)(payload("a request"))["tree"]["parts"] == tree


@pytest.mark.parametrize("more", [0, 300])
def test_prefix_of_dictionary_tree_is_reused(loads: Callable[[bytes], Loads], more: int) -> None:
    """nnsight 0.7 sends the state of each wrapper together with its children's state, by name."""

    def tree() -> dict[str, Any]:
        parts = {f"name-{number}": part for number, part in enumerate(make_tree())}
        return {"config": "of the server" * 40, "model": {"alias": None, **parts}}

    load = loads(payload("warm-up", tree=tree()))
    before = [[str(number)] for number in range(more)]
    sent = tree() | {"config": "of the client" * 40}
    loaded = load(payload(*before, tree=sent, after=sent["model"]["name-9"]))
    assert load.looked_up == 0
    assert loaded["tree"]["parts"] == sent
    assert list(loaded["tree"]["parts"]["model"]) == list(sent["model"])
    assert loaded["after"] is loaded["tree"]["parts"]["model"]["name-9"]


def _other_tree() -> bytes:
    tree = make_tree()
    tree[-1]["path"] = "layers.x"
    return payload("a request", tree=tree)


OTHERS = {
    "another tree": _other_tree(),
    "more before it": payload("a request", "more"),
    "a copy of it in a text": payload("a request", tree=[], after=payload().decode("latin-1")),
    "the end is missing": payload("a request")[:-200],
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS.keys())
def test_payload_without_cached_prefix_is_decoded_normally(
    loads: Callable[[bytes], Loads], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(load: Callable[[bytes], Any]) -> Any:
        try:
            return load(content)
        except Exception as error:
            return type(error), str(error)

    plain = Protector()
    expected = outcome(
        lambda given: plain.unpickler({})(io.BytesIO(given), plain.objects(OBJECTS)).load()
    )
    assert outcome(loads(payload("warm-up"))) == expected


def test_pickle_frame_may_begin_anywhere_in_first_payload(loads: Callable[[bytes], Loads]) -> None:
    """A frame may begin after each opcode of a part."""
    tree = [{**part, "more": f"{number:0150}"} for number, part in enumerate(make_tree())]
    firsts: dict[bytes, bytes] = {}
    for length in range(240):  # a part is shorter
        first = payload("w" * length, tree=tree)
        _, second = frame_offsets(first)
        # The frame header takes nine bytes.
        firsts.setdefault(first[second - 4 : second] + first[second + 9 : second + 13], first)
    assert len(firsts) >= 9
    for around, first in firsts.items():
        span, (_, second) = longest_container(first), frame_offsets(first)
        assert span is not None
        assert span.start < second < span.end
        load = loads(first)
        for content in (payload("a", tree=tree), payload("b", "c", "d", tree=tree), first):
            assert load(content)["tree"]["parts"] == tree, around
            assert load.looked_up == 0, around


def test_unused_decoded_prefix_is_dropped(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("warm-up"))
    before = sum(
        type(candidate) is dict and "shared" in candidate for candidate in gc.get_objects()
    )
    load.ahead()
    load.forget()
    after = sum(type(candidate) is dict and "shared" in candidate for candidate in gc.get_objects())
    assert after == before
    assert load(payload("a request"))["tree"]["parts"] == make_tree()
    assert load.looked_up == 0


def test_other_persistent_objects_are_looked_up(loads: Callable[[bytes], Loads]) -> None:
    load = loads(payload("warm-up"))
    others = {name: Server() for name in OBJECTS}
    loaded = load(payload("a request"), others)
    assert load.looked_up == PARTS
    assert loaded["tree"]["parts"][5]["module"] is others["Module:5"]


def test_prefix_with_other_references_is_decoded_again(loads: Callable[[bytes], Loads]) -> None:
    """The prefix refers to earlier memo entries, so the same bytes may decode to other objects."""

    def with_word(*words: str) -> bytes:
        tree = make_tree()
        return payload(*words, tree=[{**part, "word": words[-1]} for part in tree])

    load = loads(with_word("first"))
    assert load(with_word("other"))["tree"]["parts"][3]["word"] == "other"
    assert load.looked_up == PARTS
    for words in (("first",), ("more", "first"), ("first", "first")):
        assert load(with_word(*words))["tree"]["parts"][3]["word"] == "first"
        assert load.looked_up == 0
    assert load(with_word("first", "other"))["tree"]["parts"][3]["word"] == "other"
    assert load.looked_up == PARTS


def test_a_container_with_a_call_is_not_cached() -> None:
    assert longest_container(payload(tree=[complex(1, 2), *make_tree()])) is None


def test_a_short_container_is_not_cached() -> None:
    assert longest_container(payload(tree=[1, 2, 3])) is None
