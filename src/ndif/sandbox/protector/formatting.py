"""What takes a text that names attributes and items, for a block: these pass the guards."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

WALKS = frozenset({"format", "format_map"})
"""Methods of a text that read the attributes which it names."""

_Read = Callable[[Any, str], Any]
_Item = Callable[[Any, Any], Any]


class Formatter(string.Formatter):
    """Formats as `str.format` does, reading attributes and items by functions that it is given."""

    def __init__(self, read: _Read, item: _Item) -> None:
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


class Texts:
    """Guarded forms of `str.format` and of what `operator` has of the kind."""

    def __init__(self, read: _Read, item: _Item) -> None:
        self._read = read
        self._item = item

    def method(self, text: str, name: str) -> Callable[..., str]:
        """`text.format` or `text.format_map`."""
        return functools.partial(self.format if name == "format" else self.format_map, text)

    def guarded(self, result: Any) -> Any:
        """What a class or a `super()` gave, or the guarded form where that is one of `str`'s own."""
        if result is str.format or result is str.format_map:
            return self.format if result is str.format else self.format_map
        if type(result) is BuiltinFunctionType and result.__name__ in WALKS:
            text = result.__self__
            return self.method(text, result.__name__) if isinstance(text, str) else result
        return result

    def format(self, text: str, *arguments: Any, **options: Any) -> str:
        """`str.format`."""
        return Formatter(self._read, self._item).vformat(text, arguments, options)

    def format_map(self, text: str, mapping: Mapping[str, Any]) -> str:
        """`str.format_map`."""
        return Formatter(self._read, self._item).vformat(text, (), mapping)

    def attrgetter(self, *paths: str) -> Callable[[Any], Any]:
        """`operator.attrgetter`, looking at every name on the way."""

        def walk(value: Any, path: str) -> Any:
            for name in path.split("."):
                value = self._read(value, name)
            return value

        if not all(isinstance(path, str) for path in paths):
            raise TypeError("attribute name must be a string")
        if len(paths) == 1:
            return lambda value: walk(value, paths[0])
        return lambda value: tuple(walk(value, path) for path in paths)

    def methodcaller(self, name: str, /, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        """`operator.methodcaller`, looking at the name."""
        return lambda value: self._read(value, name)(*arguments, **options)
