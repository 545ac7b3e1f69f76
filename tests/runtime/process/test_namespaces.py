"""Lists and functions of which many are looked at at once: each change is found, and no other is."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.runtime.process.namespaces import (
    _LIST,
    _SET,
    _function_offsets,
    _is_known,
    _Items,
    _Layout,
    _Words,
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


def change(found: list[Any], how: str, value: object) -> None:
    if how in ("append", "insert"):
        found.append(value) if how == "append" else found.insert(0, value)
    elif how == "replace":
        found[:] = [value] * 500
    elif found:
        if how == "pop":
            found.pop()
        elif how == "clear":
            found.clear()
        else:
            found[len(found) // 2] = value


def test_this_interpreter_shows_its_lists_and_sets() -> None:
    assert _is_known(_LIST)
    assert _is_known(_SET)


@given(_SEVERAL, _STEPS)
def test_each_list_that_changed_is_found(
    lists: list[list[object]], steps: list[tuple[str, int, object]]
) -> None:
    kept = [list(each) for each in lists]
    words = _Items(lists, _LIST)
    assert words.changed() == []
    touched = set()
    for how, number, value in steps:
        change(lists[number % len(lists)], how, value)
        touched.add(number % len(lists))
        differ = {at for at, each in enumerate(lists) if each != kept[at]}
        assert differ <= {*words.changed()} <= touched


@given(
    st.lists(st.sets(st.integers(0, 300), max_size=200), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(_OF_SETS), st.integers(0, 300))),
)
def test_each_set_that_changed_is_found(
    sets: list[set[int]], steps: list[tuple[int, str, int]]
) -> None:
    kept = [set(each) for each in sets]
    words = _Items(sets, _SET)
    assert words.changed() == []
    touched = set()
    for number, how, value in steps:
        found = sets[number % len(sets)]
        if how == "pop":
            found and found.pop()
        elif how == "clear":
            found.clear()
        elif how == "update":
            found.update(range(value))
        else:
            getattr(found, how)(value)
        touched.add(number % len(sets))
        differ = {at for at, each in enumerate(sets) if each != kept[at]}
        assert differ <= {*words.changed()} <= touched


@pytest.mark.parametrize("layout", [_LIST, _SET])
def test_none_of_a_kind(layout: _Layout) -> None:
    assert _Items([], layout).changed() == []


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(("code", "defaults", "kwdefaults")))))
def test_each_function_that_was_replaced_is_found(steps: list[tuple[int, str]]) -> None:
    def other(_: int = 2, *, __: int = 3) -> int:
        return 1

    def made() -> types.FunctionType:
        def one(_: int = 1, *, __: int = 2) -> None: ...

        return one  # type: ignore[return-value] # a function is one

    functions = [made() for _ in range(10)]
    words = _Words(functions, _function_offsets())
    assert words.changed() == []
    for number, part in steps:
        setattr(functions[number], f"__{part}__", getattr(other, f"__{part}__"))
    assert words.changed() == sorted({number for number, _ in steps})
    words.note()
    assert words.changed() == []
