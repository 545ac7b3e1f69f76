"""Guarded `match` statements.

A class pattern reads attributes that the pattern or the class's `__match_args__` names, and no guard can be
put there. Such a statement becomes `if` and `elif`: a guard matches the subject against the pattern, and
returns the values of the pattern's names, or None.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

_Guard = Callable[..., ast.Call]

_numbers = itertools.count()


def needs_rewriting(node: ast.Match) -> bool:
    """Return True if a pattern reads an attribute, of the subject or in a dotted name."""
    patterns = [each for case in node.cases for each in ast.walk(case.pattern)]
    return any(
        isinstance(each, ast.Attribute)
        or (isinstance(each, ast.MatchClass) and (each.patterns or each.kwd_patterns))
        for each in patterns
    )


def rewrite_match(node: ast.Match, guard: _Guard) -> list[ast.stmt]:
    """Return equivalent statements without a `match`."""
    subject, found = (f"__nnsight_match_{next(_numbers)}_{what}" for what in ("subject", "found"))
    first = ast.Assign(targets=[ast.Name(subject, ast.Store())], value=node.subject)
    ast.copy_location(first, node)
    otherwise: list[ast.stmt] = []
    for case in reversed(node.cases):
        values: list[ast.expr] = []
        names: list[str] = []
        form = _form(case.pattern, values, names)
        matched = guard(
            "matched",
            case.pattern,
            ast.Name(subject, ast.Load()),
            _literal(form),
            ast.Tuple(values, ast.Load()),
        )
        tests: list[ast.expr] = [
            ast.Compare(
                ast.NamedExpr(ast.Name(found, ast.Store()), matched),
                [ast.IsNot()],
                [ast.Constant(None)],
            )
        ]
        if names:
            tests.append(
                ast.Tuple(
                    [
                        ast.NamedExpr(
                            ast.Name(name, ast.Store()),
                            ast.Subscript(
                                ast.Name(found, ast.Load()), ast.Constant(index), ast.Load()
                            ),
                        )
                        for index, name in enumerate(names)
                    ],
                    ast.Load(),
                )
            )
        if case.guard is not None:
            tests.append(case.guard)
        test = tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)
        branch = ast.If(test, case.body, otherwise)
        for each in ast.walk(branch.test):
            if not hasattr(each, "lineno"):
                ast.copy_location(each, case.pattern)
        ast.copy_location(branch, case.pattern)
        otherwise = [branch]
    return [first, *otherwise]


def _literal(value: object) -> ast.expr:
    if isinstance(value, tuple):
        return ast.Tuple([_literal(each) for each in value], ast.Load())
    return ast.Constant(cast("Any", value))


def _form(pattern: ast.pattern | None, values: list[ast.expr], names: list[str]) -> Any:
    """Return a pattern as nested tuples; append its expressions to `values` and its names to `names`."""

    def value(node: ast.expr) -> int:
        values.append(node)
        return len(values) - 1

    def name(text: str | None) -> int:
        if text is None:
            return -1
        if text not in names:
            names.append(text)
        return names.index(text)

    match pattern:
        case None:
            return ("any",)
        case ast.MatchAs():
            return ("as", name(pattern.name), _form(pattern.pattern, values, names))
        case ast.MatchValue():
            return ("value", value(pattern.value))
        case ast.MatchSingleton():
            return ("singleton", pattern.value)
        case ast.MatchOr():
            return ("or", tuple(_form(each, values, names) for each in pattern.patterns))
        case ast.MatchSequence():
            return ("sequence", tuple(_form(each, values, names) for each in pattern.patterns))
        case ast.MatchStar():
            return ("star", name(pattern.name))
        case ast.MatchMapping():
            keys = tuple(value(key) for key in pattern.keys)
            forms = tuple(_form(each, values, names) for each in pattern.patterns)
            return ("mapping", keys, forms, name(pattern.rest))
        case ast.MatchClass():
            positional = tuple(_form(each, values, names) for each in pattern.patterns)
            keyword = tuple(_form(each, values, names) for each in pattern.kwd_patterns)
            return ("class", value(pattern.cls), positional, tuple(pattern.kwd_attrs), keyword)
    raise SyntaxError("an unknown pattern")


_SELF_MATCHING = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)
"""Classes whose single positional pattern matches the subject itself."""

_MISSING = object()


class Matcher:
    """Matches subjects against patterns as Python does, reading attributes by a guard."""

    def __init__(self, read: Callable[[Any, str], Any]) -> None:
        self._read = read

    def matched(self, subject: Any, form: Any, values: tuple[Any, ...]) -> dict[int, Any] | None:
        """Return the values of the pattern's names, by number; None if the pattern does not match."""
        found: dict[int, Any] = {}
        return found if self._match(subject, form, values, found) else None

    def _match(self, subject: Any, form: Any, values: Any, found: dict[int, Any]) -> bool:
        match form[0]:
            case "any":
                return True
            case "as":
                if not self._match(subject, form[2], values, found):
                    return False
                if form[1] >= 0:
                    found[form[1]] = subject
                return True
            case "value":
                return bool(subject == values[form[1]])
            case "singleton":
                return subject is form[1]
            case "or":
                return any(self._match(subject, each, values, found) for each in form[1])
            case "sequence":
                return self._sequence(subject, form[1], values, found)
            case "mapping":
                return self._mapping(subject, form, values, found)
        return self._class(subject, form, values, found)

    def _sequence(self, subject: Any, forms: Any, values: Any, found: dict[int, Any]) -> bool:
        if not isinstance(subject, Sequence) or isinstance(subject, str | bytes | bytearray):
            return False
        star = next((index for index, form in enumerate(forms) if form[0] == "star"), None)
        if star is None:
            if len(subject) != len(forms):
                return False
            return all(map(lambda s, f: self._match(s, f, values, found), subject, forms))
        after = len(forms) - star - 1
        if len(subject) < star + after:
            return False
        items = list(subject)
        middle = items[star : len(items) - after]
        rest = items[len(items) - after :] if after else []
        for item, form in zip(
            [*items[:star], *rest], [*forms[:star], *forms[star + 1 :]], strict=True
        ):
            if not self._match(item, form, values, found):
                return False
        if forms[star][1] >= 0:
            found[forms[star][1]] = middle
        return True

    def _mapping(self, subject: Any, form: Any, values: Any, found: dict[int, Any]) -> bool:
        if not isinstance(subject, Mapping):
            return False
        keys = [values[index] for index in form[1]]
        for key, each in zip(keys, form[2], strict=True):
            item = subject.get(key, _MISSING)
            if item is _MISSING or not self._match(item, each, values, found):
                return False
        if form[3] >= 0:
            found[form[3]] = {key: item for key, item in subject.items() if key not in keys}
        return True

    def _class(self, subject: Any, form: Any, values: Any, found: dict[int, Any]) -> bool:
        _, cls, positional, names, keyword = form
        cls = values[cls]
        if not isinstance(cls, type):
            raise TypeError("called match pattern must be a class")
        if not isinstance(subject, cls):
            return False
        if positional:
            derived = cls.__mro__[1] in _SELF_MATCHING and "__match_args__" not in vars(cls)
            if cls in _SELF_MATCHING or derived:
                if len(positional) > 1:
                    raise TypeError(f"{cls.__name__}() accepts 1 positional sub-pattern")
                if not self._match(subject, positional[0], values, found):
                    return False
            else:
                ordered = getattr(cls, "__match_args__", ())
                if len(positional) > len(ordered):
                    raise TypeError(
                        f"{cls.__name__}() accepts {len(ordered)} positional sub-patterns "
                        f"({len(positional)} given)"
                    )
                names = (*ordered[: len(positional)], *names)
                keyword = (*positional, *keyword)
        for name, each in zip(names, keyword, strict=True):
            if not isinstance(name, str):
                raise TypeError("__match_args__ elements must be strings")
            try:
                value = self._read(subject, name)
            except AttributeError:
                return False
            if not self._match(value, each, values, found):
                return False
        return True
