"""`str.format` for a block: its fields name attributes and items, which pass the guards."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class Formatter(string.Formatter):
    """Formats as `str.format` does, reading attributes and items by functions that it is given."""

    def __init__(self, read: Callable[[Any, str], Any], item: Callable[[Any, Any], Any]) -> None:
        self._read = read
        self._item = item

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, int | str]:
        """The value of a field ("0.name[key]"), and its first part."""
        first, rest = _split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            value = self._read(value, name) if is_attribute else self._item(value, name)
        return value, first

    def check_unused_args(self, *_: Any) -> None:
        """Unused ones are nobody's mistake, as with `str.format`."""


def _split(name: str) -> tuple[int | str, Iterator[tuple[bool, Any]]]:
    from _string import formatter_field_name_split  # type: ignore[import-not-found]

    first, rest = formatter_field_name_split(name)
    return first, rest
