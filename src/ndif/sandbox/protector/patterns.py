"""Guarded `match` statements.

A class pattern reads attributes that the pattern or the class's `__match_args__` names, and no guard can be
put there. Such a statement becomes `if` and `elif`, in which a guard matches the subject against the
pattern. The guard returns the values of the pattern's names, or None.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ndif.sandbox.protector.names import Variables

_Read = Callable[[Any, str], Any]

_numbers = itertools.count()


def needs_rewriting(node: ast.Match) -> bool:
    """Return True if a pattern reads an attribute, of the subject or in a dotted name."""
    patterns = [part for case in node.cases for part in ast.walk(case.pattern)]
    return any(
        isinstance(part, ast.Attribute)
        or (isinstance(part, ast.MatchClass) and (part.patterns or part.kwd_patterns))
        for part in patterns
    )


def bound_names(pattern: ast.pattern) -> dict[str, ast.AST]:
    """Return the names that a pattern binds, with the part of the pattern that binds each."""
    names = {
        getattr(part, "name", None) or getattr(part, "rest", None): part
        for part in ast.walk(pattern)
        if isinstance(part, ast.MatchAs | ast.MatchStar | ast.MatchMapping)
    }
    return {name: part for name, part in names.items() if name is not None}


def _expressions(pattern: ast.pattern) -> list[ast.expr]:
    """Return the expressions that a pattern evaluates."""
    expressions: list[ast.expr] = []
    for part in ast.walk(pattern):
        if isinstance(part, ast.MatchValue):
            expressions.append(part.value)
        elif isinstance(part, ast.MatchMapping):
            expressions += part.keys
        elif isinstance(part, ast.MatchClass):
            expressions.append(part.cls)
    return expressions


def rewrite_match(
    node: ast.Match,
    guard: Callable[..., ast.Call],
    constant: Callable[[ast.pattern], ast.Constant],
) -> list[ast.stmt]:
    """Return equivalent statements without a `match`."""
    subject, captures = (
        f"__nnsight_match_{next(_numbers)}_{role}" for role in ("subject", "found")
    )
    assignment = ast.Assign([ast.Name(subject, ast.Store())], node.subject)
    otherwise: list[ast.stmt] = []
    for case in reversed(node.cases):
        binding = "".join(f"{name} := {captures}[{name!r}], " for name in bound_names(case.pattern))
        condition = f"({captures} := ...) is not None and ({binding}True)"
        test = cast("Any", ast.parse(condition, mode="eval").body)
        for part in ast.walk(test):
            ast.copy_location(part, case.pattern)
        test.values[0].left.value = guard(
            "matched",
            case.pattern,
            ast.Name(subject, ast.Load()),
            constant(case.pattern),
            ast.Tuple(_expressions(case.pattern), ast.Load()),
        )
        if case.guard is not None:
            test.values.append(case.guard)
        otherwise = [ast.copy_location(ast.If(test, case.body, otherwise), case.pattern)]
    return [ast.copy_location(assignment, node), *otherwise]


_SELF_MATCHING = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)
"""Classes whose single positional pattern matches the subject itself."""

_MISSING = object()


def matched(
    read: _Read, subject: Any, pattern: ast.pattern, values: tuple[Any, ...]
) -> Variables | None:
    """Match as Python does, with `read` for attributes; return the values of the names, or None."""
    by_id = dict(zip(map(id, _expressions(pattern)), values, strict=True))
    attempt = _Match(read, by_id, {})
    return attempt.captures if attempt.matches(subject, pattern) else None


@dataclass(frozen=True, slots=True)
class _Match:
    read: _Read
    values: Mapping[int, Any]
    """Values of the pattern's expressions, by the expression's id."""
    captures: Variables
    """Values of the pattern's names."""

    def matches(self, subject: Any, pattern: Any) -> bool:
        match pattern:
            case ast.MatchAs():
                if pattern.pattern is not None and not self.matches(subject, pattern.pattern):
                    return False
                if pattern.name is not None:
                    self.captures[pattern.name] = subject
                return True
            case ast.MatchValue():
                return bool(subject == self.values[id(pattern.value)])
            case ast.MatchSingleton():
                return subject is pattern.value
            case ast.MatchOr():
                return any(self.matches(subject, alternative) for alternative in pattern.patterns)
            case ast.MatchSequence():
                return self._sequence(subject, pattern.patterns)
            case ast.MatchMapping():
                return self._mapping(subject, pattern)
        return self._class(subject, pattern)

    def _sequence(self, subject: Any, patterns: list[Any]) -> bool:
        if not isinstance(subject, Sequence) or isinstance(subject, str | bytes | bytearray):
            return False
        stars = [
            index for index, element in enumerate(patterns) if isinstance(element, ast.MatchStar)
        ]
        star_length = len(subject) - len(patterns) + len(stars)
        if star_length < 0 or (star_length and not stars):
            return False
        items = list(subject)
        for star in stars:
            if patterns[star].name is not None:
                self.captures[patterns[star].name] = items[star : star + star_length]
            items[star : star + star_length] = []
            patterns = [*patterns[:star], *patterns[star + 1 :]]
        return all(map(self.matches, items, patterns))

    def _mapping(self, subject: Any, pattern: ast.MatchMapping) -> bool:
        if not isinstance(subject, Mapping):
            return False
        keys = [self.values[id(key)] for key in pattern.keys]
        for key, subpattern in zip(keys, pattern.patterns, strict=True):
            item = subject.get(key, _MISSING)
            if item is _MISSING or not self.matches(item, subpattern):
                return False
        if pattern.rest is not None:
            self.captures[pattern.rest] = {
                key: item for key, item in subject.items() if key not in keys
            }
        return True

    def _class(self, subject: Any, pattern: ast.MatchClass) -> bool:
        cls, positional = self.values[id(pattern.cls)], pattern.patterns
        if not isinstance(cls, type):
            raise TypeError("called match pattern must be a class")
        if not isinstance(subject, cls):
            return False
        names, patterns = [*pattern.kwd_attrs], [*pattern.kwd_patterns]
        candidates = cls.__mro__[: 1 if "__match_args__" in vars(cls) else 2]
        if positional and any(candidate in _SELF_MATCHING for candidate in candidates):
            if len(positional) > 1:
                raise TypeError(f"{cls.__name__}() accepts 1 positional sub-pattern")
            if not self.matches(subject, positional[0]):
                return False
        elif positional:
            ordered = getattr(cls, "__match_args__", ())
            if len(positional) > len(ordered):
                raise TypeError(
                    f"{cls.__name__}() accepts {len(ordered)} positional sub-patterns "
                    f"({len(positional)} given)"
                )
            names = [*ordered[: len(positional)], *names]
            patterns = [*positional, *patterns]
        for name, subpattern in zip(names, patterns, strict=True):
            if not isinstance(name, str):
                raise TypeError("__match_args__ elements must be strings")
            try:
                value = self.read(subject, name)
            except AttributeError:
                return False
            if not self.matches(value, subpattern):
                return False
        return True
