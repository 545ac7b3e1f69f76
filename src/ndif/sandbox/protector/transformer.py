"""Compilation of a user's code with calls of guards in its syntax tree.

A guard is a constant of the code object, not a name: no name that a block binds, and no global that a
payload brings, can replace it.
"""

from __future__ import annotations

import ast
import re
import secrets
import warnings
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, cast

from RestrictedPython.transformer import INSPECT_ATTRIBUTES

from ndif.sandbox.protector.names import UNBOUND
from ndif.sandbox.protector.patterns import bound_names, needs_rewriting, rewrite_match

_TOKEN = secrets.token_hex(16)
"""A prefix, unknown to any source, of the string constants that are replaced by guards."""

_GENERATED = re.compile(r"^(\w+)\.mediators\[-1\]\.info\.frame = \1\.get_frame\(\)$")
"""The statement that nnsight 0.6 and 0.7 generate around a block, and that guards would refuse."""

_IN_ANNOTATIONS = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.BinOp, ast.BitOr,
    ast.Load, ast.Starred, ast.UnaryOp, ast.USub, ast.Slice,
)  # fmt: skip
"""Syntax of an annotation that a library evaluates."""


def private(name: str) -> bool:
    """Return True if an attribute of this name needs the guard of private attributes."""
    return name.startswith("_") or name in INSPECT_ATTRIBUTES


class Transformer(ast.NodeTransformer):
    """Replaces accesses to attributes and items by calls of guards, and refuses names in `UNBOUND`."""

    def __init__(self, filename: str, lines: list[str]) -> None:
        self._filename = filename
        self._lines = lines
        self._classes: list[str] = []
        self._has_string_annotations = False
        """True with `from __future__ import annotations`: annotations are not evaluated."""
        self.patterns: dict[str, ast.pattern] = {}
        """Patterns of rewritten `match` statements, by the names of the constants that stand for them."""

    def guard(self, name: str, at: ast.AST, *arguments: ast.expr) -> ast.Call:
        """Return a call of a guard, located at `at`."""
        function = ast.copy_location(ast.Constant(_TOKEN + name), at)
        return ast.copy_location(ast.Call(function, list(arguments), []), at)

    def pattern(self, pattern: ast.pattern) -> ast.Constant:
        """Return a constant that `_with_constants` replaces by the pattern."""
        name = f"pattern {len(self.patterns)}"
        self.patterns[name] = pattern
        return ast.Constant(_TOKEN + name)

    def refuse(self, node: ast.AST, why: str) -> SyntaxError:
        """Return a SyntaxError located at the user's line."""
        line = getattr(node, "lineno", 1)
        text = self._lines[line - 1] if line <= len(self._lines) else None
        column = getattr(node, "col_offset", 0) + 1
        return SyntaxError(why, (self._filename, line, column, text))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        value, name = self.visit(node.value), self._mangled(node.attr)
        constant = ast.copy_location(ast.Constant(name), node)
        if isinstance(node.ctx, ast.Load):
            return self.guard("private" if private(name) else "attribute", node, value, constant)
        node.value = self.guard("written", node.value, value, constant)
        return node

    def _mangled(self, name: str) -> str:
        """Return the name that the compiler makes of `__name` in a class."""
        owner = self._classes[-1].lstrip("_") if self._classes else ""
        mangled = owner and name.startswith("__") and not name.endswith("__")
        return f"_{owner}{name}" if mangled else name

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and not _is_plain_index(node.slice):
            return self.guard("item", node, node.value, node.slice)
        return node

    def _check_name(self, name: str | None, node: ast.AST) -> None:
        if name in UNBOUND:
            raise self.refuse(node, f"the name {name!r} cannot be bound on this server")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            self._check_name(node.id, node)
        elif node.id == "__builtins__":
            return self.guard("builtins", node)
        elif node.id == "__annotations__":
            raise self.refuse(node, "the name '__annotations__' cannot be used on this server")
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        self._check_name(node.arg, node)
        node.annotation = self._annotation(node.annotation)
        return node

    def visit_alias(self, node: ast.alias) -> ast.alias:
        self._check_name(node.asname or node.name.partition(".")[0], node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "__future__" and any(name.name == "annotations" for name in node.names):
            self._has_string_annotations = True
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self._check_name(node.name, node)
        return self.generic_visit(node)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> ast.AST:
        for name in node.names:
            self._check_name(name, node)
        return node

    visit_Nonlocal = visit_Global  # noqa: N815

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._check_name(node.name, node)
        returns, node.returns = self._annotation(node.returns), None
        self.generic_visit(node)
        node.returns = returns
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._check_name(node.name, node)
        body = ast.Module(node.body, [])
        node.body = []
        self.generic_visit(node)
        # Names are mangled in the body alone.
        self._classes.append(node.name)
        self.generic_visit(body)
        self._classes.pop()
        node.body = body.body
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = cast("ast.expr", self._annotation(node.annotation))
        node.target = self.visit(node.target)
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def _annotation(self, node: ast.expr | None) -> ast.expr | None:
        """Guard an annotation, or check that a library may evaluate it if it is a string."""
        if node is None:
            return None
        if self._has_string_annotations:
            self._check_string_annotation(node)
            return node
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                try:
                    parsed = ast.parse(part.value.strip(), mode="eval")
                except SyntaxError:
                    continue
                self._check_string_annotation(parsed.body, node)
        return cast("ast.expr", self.visit(node))

    def _check_string_annotation(self, node: ast.expr, at: ast.AST | None = None) -> None:
        for part in ast.walk(node):
            is_private = isinstance(part, ast.Attribute) and private(part.attr)
            if is_private or not isinstance(part, _IN_ANNOTATIONS):
                raise self.refuse(
                    at or part,
                    "an annotation that is not evaluated must name a type, without calls or private "
                    "attributes",
                )

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        [target, *_] = node.targets
        generated = isinstance(target, ast.Attribute) and target.attr == "frame"
        if generated and _GENERATED.match(ast.unparse(node)):
            return node
        return self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> ast.AST | list[ast.stmt]:
        for case in node.cases:
            for name, part in bound_names(case.pattern).items():
                self._check_name(name, part)
        if not needs_rewriting(node):
            return self.generic_visit(node)
        return [
            self.visit(statement) for statement in rewrite_match(node, self.guard, self.pattern)
        ]


def _is_plain_index(index: ast.expr) -> bool:
    """Return True if an index is written as numbers and slices, which cannot name an attribute."""
    if isinstance(index, ast.Constant):
        return not isinstance(index.value, str)
    if isinstance(index, ast.UnaryOp):
        return isinstance(index.operand, ast.Constant)
    return isinstance(index, ast.Slice | ast.Tuple)


def _copied(part: Any) -> Any:
    """Return a copy of a syntax tree; `copy.deepcopy` takes longer than the rest of the compilation."""
    if isinstance(part, ast.AST):
        clone = type(part).__new__(type(part))
        vars(clone).update((name, _copied(value)) for name, value in vars(part).items())
        return clone
    return [_copied(item) for item in part] if type(part) is list else part


def compile_guarded(
    source: str | ast.AST, filename: str, mode: str, guards: Mapping[str, Callable[..., Any]]
) -> CodeType:
    """Compile source text or a syntax tree, which stays unchanged, with calls of `guards`.

    Raises:
        SyntaxError: If `source` is not Python, or binds a name that it may not.
    """
    if isinstance(source, ast.AST):
        tree, lines = _copied(source), []
    else:
        tree, lines = ast.parse(source, filename, mode), source.splitlines()
    transformer = Transformer(filename, lines)
    tree = ast.fix_missing_locations(transformer.visit(tree))
    with warnings.catch_warnings():
        # Guards are constants, and the compiler warns about a call of a constant.
        warnings.filterwarnings("ignore", "'str' object is not callable", SyntaxWarning)
        code: CodeType = compile(cast("Any", tree), filename, mode, dont_inherit=True)
    return _with_constants(code, {**guards, **transformer.patterns})


def compile_plain(
    wanted: CodeType, within: CodeType, source: str | ast.AST, filename: str, mode: str
) -> CodeType | None:
    """Return function `wanted` of guarded code `within` as code without guards; None if it is not there."""
    places = _places(wanted, within)
    if places is None:
        return None
    plain: CodeType = compile(cast("Any", source), filename, mode, dont_inherit=True)
    for place in places:
        plain = nested(plain)[place]
    same = (plain.co_name, plain.co_freevars) == (wanted.co_name, wanted.co_freevars)
    return plain if same else None


def _places(wanted: CodeType, within: CodeType) -> list[int] | None:
    """Return the indices in `nested` that lead from `within` to `wanted`, outermost first, or None."""
    for place, inner in enumerate(nested(within)):
        if inner is wanted:
            return [place]
        inner_places = _places(wanted, inner)
        if inner_places is not None:
            return [place, *inner_places]
    return None


def nested(code: CodeType) -> list[CodeType]:
    """Return the code of the functions and classes within code."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _with_constants(code: CodeType, values: Mapping[str, Any]) -> CodeType:
    constants = tuple(
        _with_constants(constant, values)
        if isinstance(constant, CodeType)
        else values[constant[len(_TOKEN) :]]
        if isinstance(constant, str) and constant.startswith(_TOKEN)
        else constant
        for constant in code.co_consts
    )
    return code.replace(co_consts=constants)
