"""Many lists, sets and functions are checked at once: each change is found, without false reports."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.runtime.process.namespaces import (
    _LIST,
    _SET,
    Namespaces,
    _function_offsets,
    _has_layout,
    _Items,
    _Layout,
    _Words,
    copied,
    has_same_members,
)

_OBJECTS = [object() for _ in range(8)]
_SEVERAL = st.lists(st.lists(st.sampled_from(_OBJECTS), max_size=40), min_size=1, max_size=12)
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("append", "pop", "clear", "put", "insert", "replace")),
        st.integers(0, 11),
        st.sampled_from(_OBJECTS),
    ),
    max_size=30,
)


_OF_SETS = ("add", "discard", "pop", "clear", "update")


def change(values: list[Any], how: str, value: object) -> None:
    if how in ("append", "insert"):
        values.append(value) if how == "append" else values.insert(0, value)
    elif how == "replace":
        values[:] = [value] * 500
    elif values:
        if how == "pop":
            values.pop()
        elif how == "clear":
            values.clear()
        else:
            values[len(values) // 2] = value


def test_interpreters_list_and_set_layouts_are_known() -> None:
    assert _has_layout(_LIST)
    assert _has_layout(_SET)


@given(_SEVERAL, _STEPS)
def test_every_changed_list_is_found(
    lists: list[list[object]], steps: list[tuple[str, int, object]]
) -> None:
    kept = [list(values) for values in lists]
    words = _Items(lists, _LIST)
    assert words.changed() == []
    touched = set()
    for how, number, value in steps:
        change(lists[number % len(lists)], how, value)
        touched.add(number % len(lists))
        differ = {at for at, values in enumerate(lists) if values != kept[at]}
        assert differ <= {*words.changed()} <= touched


@given(
    st.lists(st.sets(st.integers(0, 300), max_size=200), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(_OF_SETS), st.integers(0, 300))),
)
def test_every_changed_set_is_found(
    sets: list[set[int]], steps: list[tuple[int, str, int]]
) -> None:
    kept = [set(values) for values in sets]
    words = _Items(sets, _SET)
    assert words.changed() == []
    touched = set()
    for number, how, value in steps:
        chosen = sets[number % len(sets)]
        if how == "pop":
            chosen and chosen.pop()
        elif how == "clear":
            chosen.clear()
        elif how == "update":
            chosen.update(range(value))
        else:
            getattr(chosen, how)(value)
        touched.add(number % len(sets))
        differ = {at for at, values in enumerate(sets) if values != kept[at]}
        assert differ <= {*words.changed()} <= touched


@pytest.mark.parametrize("layout", [_LIST, _SET])
def test_empty_collection_has_no_changes(layout: _Layout) -> None:
    assert _Items([], layout).changed() == []


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(("code", "defaults", "kwdefaults")))))
def test_every_function_with_replaced_parts_is_found(steps: list[tuple[int, str]]) -> None:
    def other(_: int = 2, *, __: int = 3) -> int:
        return 1

    def make_function() -> types.FunctionType:
        def one(_: int = 1, *, __: int = 2) -> None: ...

        return one  # type: ignore[return-value] # a function is one

    functions = [make_function() for _ in range(10)]
    words = _Words(functions, _function_offsets())
    assert words.changed() == []
    for number, part in steps:
        setattr(functions[number], f"__{part}__", getattr(other, f"__{part}__"))
    assert words.changed() == sorted({number for number, _ in steps})
    words.record()
    assert words.changed() == []


def test_changes_to_objects_added_since_fork_server_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("known")
    module.__dict__.update(kept=[1], table={"a": 1})
    monkeypatch.setitem(sys.modules, "known", module)
    monkeypatch.setattr(Namespaces, "of_fork_server", Namespaces(functions=False))

    added = types.ModuleType("added")
    added.__dict__.update(names=["b"], seen={1, 2})
    monkeypatch.setitem(sys.modules, "added", added)
    module.later = ["c"]  # type: ignore[attr-defined]
    module.kept.append(2)
    cls = type("Added", (), {"shared": []})

    namespaces = Namespaces.of_this_process(functions=False)
    assert namespaces is Namespaces.of_fork_server
    mine = ("known", "added", f"{__name__}.Added")
    assert [
        difference for difference in namespaces.changes() if difference.name.startswith(mine)
    ] == []
    module.kept.append(3)
    module.table["a"] = 2
    module.later.append("d")  # type: ignore[attr-defined]
    added.names.clear()
    added.seen.add(3)
    cls.shared.append(1)  # type: ignore[attr-defined]
    changes = {
        difference.name: difference
        for difference in namespaces.changes()
        if difference.name.startswith(mine)
    }
    assert {*changes} == {
        *("known.kept", "known.table", "known.later", "added.names", "added.seen"),
        f"{__name__}.Added.shared",
    }
    for difference in changes.values():
        difference.restore()
    assert (module.kept, module.table, module.later) == ([1, 2], {"a": 1}, ["c"])  # type: ignore[attr-defined]
    assert (added.names, added.seen, cls.shared) == (["b"], {1, 2}, [])  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "added")
    assert namespaces.restore_modules(lambda _: False) == ""
    assert sys.modules["added"] is added


def test_dictionary_with_computed_items_is_copied_unevaluated() -> None:
    class Makes(OrderedDict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return super().__getitem__(key)()

    makes = Makes(one=list)
    assert copied(makes) == {"one": list}
    assert has_same_members(makes, copied(makes))
