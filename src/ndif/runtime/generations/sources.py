"""The modules whose `.source` a block names, instrumented before the model runs.

nnsight instruments a module when its `.source` is read. In the user's process, code before the trace may
read it. On the server, the block may be the first reader, when the forward pass has begun: too late.
So the text of a block, and of the functions sent with it, is searched for `.source`. If an expression may
refer to several modules, all are instrumented, which changes no values. Modules that the search misses are
instrumented on reading, as usual.
"""

from __future__ import annotations

import ast
import contextlib
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from nnsight.intervention.envoy import Envoy

if TYPE_CHECKING:
    from ndif.sandbox.protector.names import Variables


_SAME_ITEMS = frozenset(("enumerate", "zip", "list", "tuple", "reversed", "iter", "next"))
_SAME_ITEMS_METHODS = frozenset(("items", "values", "children", "named_children"))
_ANY = "*"
"""The index of an item that the text does not determine."""

_functions: list[tuple[str, FunctionType]] = []
"""The functions of the present request, with their texts."""


def record(text: str, function: FunctionType) -> None:
    """Record a function that was sent with a request."""
    _functions.append((text, function))


def forget() -> None:
    """Forget the functions of earlier requests."""
    _functions.clear()


def instrument(blocks: Iterable[tuple[str, Mapping[str, Any]]], also: Iterable[Any] = ()) -> None:
    """Instrument the modules whose `.source` is named in blocks, pairs of text and values by name."""
    blocks, named = [*blocks], [*also]
    if any(".source" in text for text, _ in (*blocks, *_functions)):
        named += _find_named(
            [*blocks, *((text, names_of(function)) for text, function in _functions)]
        )
    for envoy in _unique(named):
        with contextlib.suppress(Exception):  # no source; the block's own access raises the error
            _ = envoy.source


def names_of(function: FunctionType) -> Variables:
    """Return the values of a function's globals and closure by name."""
    names = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            names[name] = cell.cell_contents
    return names


def _find_named(texts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Envoy]:
    envoys: list[Envoy] = []
    roots = _union(_meaning_of(value) for _, names in texts for value in names.values()).envoys
    everything = _unique(part for root in roots for part in root.modules())
    for text, names in texts:
        if ".source" in text:
            with contextlib.suppress(Exception):  # for an invalid text, the block itself fails
                tree = ast.parse(textwrap.dedent(text))
                envoys += _Text(tree, names, everything).named()
    return envoys


class _Meaning(NamedTuple):
    """The modules that an expression may refer to, itself or by its items."""

    envoys: tuple[Envoy, ...] = ()
    is_unknown: bool = False
    """True if the expression may also refer to any other module."""


class _Text:
    """The text of a block or function, with the values of its names before it runs."""

    def __init__(
        self, tree: ast.AST, values: Mapping[str, Any], everything: tuple[Envoy, ...]
    ) -> None:
        self._tree = tree
        self._values = values
        self._everything = everything
        self._bound: dict[str, list[tuple[ast.expr | None, bool]]] = defaultdict(list)
        """The expressions bound to each name, None if unknown; True if an item of it is bound."""
        self._meanings: dict[str, _Meaning] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value, is_item=False)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
                self._bind(node.target, node.value, is_item=False)
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind(node.target, node.iter, is_item=True)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._bind(node.optional_vars, None, is_item=False)
            elif isinstance(node, ast.arg):
                self._bound[node.arg].append((None, False))

    def named(self) -> list[Envoy]:
        """Return the modules whose `.source` the text names."""
        nodes = [node for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)]
        return [
            envoy
            for node in nodes
            if node.attr == "source"
            for envoy in self._resolve(node.value).envoys
        ]

    def _bind(self, target: ast.expr, value: ast.expr | None, *, is_item: bool) -> None:
        if isinstance(target, ast.Name):
            self._bound[target.id].append((value, is_item))
        elif isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._bind(element, value, is_item=True)

    def _resolve(self, node: ast.expr | None) -> _Meaning:
        if node is None:
            return _Meaning(is_unknown=True)
        if isinstance(node, ast.Name):
            return self._resolve_name(node.id)
        if isinstance(node, ast.Attribute):
            return self._part(self._resolve(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return self._item(self._resolve(node.value), node.slice)
        if isinstance(node, ast.Call):
            return self._resolve_call(node.func, node.args)
        # A choice, or a list of modules.
        parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return _union(map(self._resolve, parts))

    def _resolve_name(self, name: str) -> _Meaning:
        if name not in self._meanings:
            self._meanings[name] = _meaning_of(self._values.get(name))
            for value, is_item in self._bound[name]:
                # The expression may use the name itself, as in `layer = layer.attn`.
                meaning = self._item(self._resolve(value)) if is_item else self._resolve(value)
                self._meanings[name] = _union((self._meanings[name], meaning))
        return self._meanings[name]

    def _resolve_call(self, function: ast.expr, arguments: list[ast.expr]) -> _Meaning:
        if isinstance(function, ast.Name) and function.id in _SAME_ITEMS:
            return _union(map(self._resolve, arguments))
        if isinstance(function, ast.Attribute) and function.attr in _SAME_ITEMS_METHODS:
            return self._resolve(function.value)
        if isinstance(function, ast.Attribute) and function.attr == "get" and arguments:
            meaning = self._resolve(function.value)
            for part in _path(arguments[0]):
                meaning = self._item(meaning) if _ANY in part else self._part(meaning, part)
            return meaning
        return _Meaning(is_unknown=True)

    def _part(self, meaning: _Meaning, name: str) -> _Meaning:
        parts = [vars(envoy).get(name) for envoy in self._envoys_of(meaning)]
        envoys = [part for part in parts if isinstance(part, Envoy)]
        return _Meaning(_unique(envoys), meaning.is_unknown)

    def _item(self, meaning: _Meaning, index: ast.expr | None = None) -> _Meaning:
        """Return the items of module lists for an index or a loop; a module that is no list is an item."""
        items: list[Envoy] = []
        for envoy in self._envoys_of(meaning):
            if hasattr(type(envoy._module), "__getitem__"):
                parts = [part for part in vars(envoy).values() if isinstance(part, Envoy)]
                items += self._select(parts, index)
            elif envoy in meaning.envoys:
                items.append(envoy)
        return _Meaning(_unique(items), meaning.is_unknown)

    def _select(self, parts: list[Envoy], index: ast.expr | None) -> list[Envoy]:
        """Return the part at an index; all parts if the index is not a known number."""
        if isinstance(index, ast.Name) and not self._bound[index.id]:
            index = ast.Constant(self._values.get(index.id))
        try:
            return [parts[ast.literal_eval(index)]] if index is not None else parts
        except (ValueError, TypeError):
            return parts
        except IndexError:
            return []

    def _envoys_of(self, meaning: _Meaning) -> tuple[Envoy, ...]:
        return self._everything if meaning.is_unknown else meaning.envoys


def _path(node: ast.expr) -> list[str]:
    """Return the components of a path in a string, with `_ANY` in place of each f-string expression."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [str(part.value) if isinstance(part, ast.Constant) else _ANY for part in parts]
    return "".join(texts).split(".")


def _meaning_of(value: Any, depth: int = 2) -> _Meaning:
    """Return the modules that a value of the script is or contains."""
    if isinstance(value, Envoy):
        return _Meaning((value,))
    if depth and type(value) in (list, tuple, set, dict):
        items = value.values() if type(value) is dict else value
        return _union(_meaning_of(item, depth - 1) for item in items)
    return _Meaning()


def _union(meanings: Iterable[_Meaning]) -> _Meaning:
    meanings = [*meanings]
    envoys = _unique(envoy for meaning in meanings for envoy in meaning.envoys)
    return _Meaning(envoys, any(meaning.is_unknown for meaning in meanings))


def _unique(envoys: Iterable[Envoy]) -> tuple[Envoy, ...]:
    return tuple({id(envoy): envoy for envoy in envoys}.values())
