"""Hints for the author of a block that does not save its results."""

from __future__ import annotations

import collections
import dis
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

_KINDS: dict[type, str] = {list: "[]", dict: "{}", set: "set()"}
"""Containers that scripts commonly fill, with the expressions that create them."""
_OTHERS = (collections.deque, collections.defaultdict, collections.Counter, collections.OrderedDict)
_MAX_COMPARED = 100_000
"""Most items of a container whose contents are compared; for a larger one, only the sizes are."""
_MAX_NAMED = 3
_BEFORE_OTHER_NAMES = frozenset(
    ("FOR_ITER", "BEFORE_WITH", "SETUP_WITH", "MAKE_FUNCTION", "IMPORT_NAME", "IMPORT_FROM")
)
"""Instructions that precede the binding of a loop variable, a tracer, a function or a module."""


class Unsaved:
    """The containers that a block takes from its script, with their contents before the block runs."""

    def __init__(self, *scopes: Mapping[str, Any]) -> None:
        self._before = {
            name: (value, _content(value))
            for scope in scopes
            for name, value in scope.items()
            if type(value) in (*_KINDS, *_OTHERS) and not name.startswith("__")
        }

    def hints(
        self, saved: Collection[int], count: int, codes: Iterable[CodeType] = ()
    ) -> Iterator[str]:
        """Yield hints for the block's author; `saved` are ids, and `count` values are returned.

        `codes` is the code of the block, for the names that it binds.
        """
        filled = [
            (name, value)
            for name, (value, before) in self._before.items()
            if id(value) not in saved and not _is_same(_content(value), before)
        ]
        for name, value in filled:
            expression = _KINDS.get(type(value), f"{type(value).__name__}(...)")
            yield (
                f"The block filled {name!r}, which was made outside of it. The server filled a copy, and "
                f"yours is unchanged: make it in the block, with `{name} = {expression}.save()`."
            )
        if count == 0 and not filled:
            names = list(dict.fromkeys(name for code in codes for name in _bound(code)))[
                -_MAX_NAMED:
            ]
            # A block that binds no name probably only prints.
            if names:
                yield (
                    f"The block saved nothing, so none of its values comes back ({', '.join(names)}). "
                    f"Save in it the values that you need later, with `{names[-1]} = {names[-1]}.save()`."
                )


def _content(value: Any) -> tuple[int, list[Any]]:
    items = value.values() if isinstance(value, dict) else value
    return len(value), list(items) if len(value) <= _MAX_COMPARED else []


def _is_same(now: tuple[int, list[Any]], before: tuple[int, list[Any]]) -> bool:
    return now[0] == before[0] and all(a is b for a, b in zip(now[1], before[1], strict=False))


def _bound(code: CodeType) -> Iterator[str]:
    """Yield the names of values that a block binds."""
    instructions = list(dis.get_instructions(code))
    # Python deletes the name of an exception after its handler.
    deleted = {
        instruction.argval
        for instruction in instructions
        if instruction.opname.startswith("DELETE_")
    }
    for before, instruction in itertools.pairwise(instructions):
        binds = (
            instruction.opname in ("STORE_NAME", "STORE_FAST") and instruction.argval not in deleted
        )
        if (
            binds
            and before.opname not in _BEFORE_OTHER_NAMES
            and not instruction.argval.startswith("_")
        ):
            yield instruction.argval
