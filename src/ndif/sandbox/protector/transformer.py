# ruff: noqa: D102 - visit_X visits an X
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

from ndif.sandbox.protector.patterns import needs_rewriting, rewrite_match

_TOKEN = secrets.token_hex(16)
"""A prefix, unknown to any source, of the string constants that are replaced by guards."""

UNBOUND = frozenset(
    {
        "__builtins__",
        "__import__",
        "__build_class__",
        "__loader__",
        "__spec__",
        "__annotations__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__reduce__",
        "__reduce_ex__",
        # Given one of these, numpy and torch treat any address as an array.
        "__array_interface__",
        "__array_struct__",
        "__cuda_array_interface__",
        "__dlpack__",
    }
)
"""Names that a user's code may not bind, in a class or elsewhere."""

_GENERATED = re.compile(r"^(\w+)\.mediators\[-1\]\.info\.frame = \1\.get_frame\(\)$")
"""The statement that nnsight 0.6 and 0.7 generate around a block, and that a user may not write."""


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

    # --- calls of guards ---------------------------------------------------------------------------

    def guard(self, name: str, at: ast.AST, *arguments: ast.expr) -> ast.Call:
        """Return a call of a guard, located at `at`."""
        function = ast.Constant(_TOKEN + name)
        call = ast.Call(func=function, args=list(arguments), keywords=[])
        ast.copy_location(function, at)
        return ast.copy_location(call, at)

    def refuse(self, node: ast.AST, why: str) -> SyntaxError:
        """Return a SyntaxError located at the user's line."""
        line = getattr(node, "lineno", 1)
        text = self._lines[line - 1] if line <= len(self._lines) else None
        column = getattr(node, "col_offset", 0) + 1
        return SyntaxError(why, (self._filename, line, column, text))

    def _constant(self, value: str, at: ast.AST) -> ast.Constant:
        return ast.copy_location(ast.Constant(value), at)

    # --- attributes and items ----------------------------------------------------------------------

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name = self._mangled(node.attr)
        value = self.visit(node.value)
        if isinstance(node.ctx, ast.Load):
            kind = "private" if private(name) else "attribute"
            return self.guard(kind, node, value, self._constant(name, node))
        node.value = self.guard("written", node.value, value, self._constant(name, node))
        return node

    def _mangled(self, name: str) -> str:
        """Return the name that the compiler makes of `__name` in a class."""
        if name.startswith("__") and not name.endswith("__") and self._classes:
            return (
                f"_{self._classes[-1].lstrip('_')}{name}" if self._classes[-1].strip("_") else name
            )
        return name

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and not _plain_index(node.slice):
            return self.guard("item", node, node.value, node.slice)
        return node

    # --- names ---------------------------------------------------------------------------------------

    def _check_name(self, name: str | None, node: ast.AST) -> None:
        if name in UNBOUND:
            raise self.refuse(node, f"the name {name!r} cannot be bound on this server")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            if node.id == "__builtins__":
                return self.guard("builtins", node)
            if node.id == "__annotations__":
                raise self.refuse(node, "the name '__annotations__' cannot be used on this server")
        else:
            self._check_name(node.id, node)
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

    def visit_Global(self, node: ast.Global) -> ast.AST:
        for name in node.names:
            self._check_name(name, node)
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        for name in node.names:
            self._check_name(name, node)
        return node

    # --- definitions ------------------------------------------------------------------------------

    def _function(self, node: Any) -> ast.AST:
        self._check_name(node.name, node)
        node.returns = self._annotation(node.returns)
        returns, node.returns = node.returns, None
        self.generic_visit(node)
        node.returns = returns
        return cast("ast.AST", node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._check_name(node.name, node)
        node.decorator_list = [self.visit(each) for each in node.decorator_list]
        node.bases = [self.visit(each) for each in node.bases]
        node.keywords = [self.visit(each) for each in node.keywords]
        self._classes.append(node.name)
        node.body = self._visited(node.body)
        self._classes.pop()
        return node

    def _visited(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in body:
            made = self.visit(statement)
            result.extend(made if isinstance(made, list) else [made])
        return result

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
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                try:
                    self._check_string_annotation(
                        ast.parse(each.value.strip(), mode="eval").body, node
                    )
                except SyntaxError as error:
                    if error.filename == self._filename:
                        raise
        return cast("ast.expr", self.visit(node))

    def _check_string_annotation(self, node: ast.expr, at: ast.AST | None = None) -> None:
        for each in ast.walk(node):
            harmless = not (isinstance(each, ast.Attribute) and private(each.attr)) and isinstance(
                each,
                ast.Name
                | ast.Attribute
                | ast.Subscript
                | ast.Tuple
                | ast.List
                | ast.Constant
                | ast.BinOp
                | ast.BitOr
                | ast.Load
                | ast.Starred
                | ast.UnaryOp
                | ast.USub
                | ast.Slice,
            )
            if not harmless:
                raise self.refuse(
                    at or each,
                    "an annotation that is not evaluated must name a type, without calls or private "
                    "attributes",
                )

    # --- statements ---------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        [target, *_] = node.targets
        generated = isinstance(target, ast.Attribute) and target.attr == "frame"
        if generated and _GENERATED.match(ast.unparse(node)):
            return node
        return self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> ast.AST | list[ast.stmt]:
        for each in ast.walk(node):
            if isinstance(each, ast.MatchAs | ast.MatchStar):
                self._check_name(each.name, each)
            elif isinstance(each, ast.MatchMapping):
                self._check_name(each.rest, each)
        if not needs_rewriting(node):
            return self.generic_visit(node)
        return [self.visit(statement) for statement in rewrite_match(node, self.guard)]


def _plain_index(index: ast.expr) -> bool:
    """Return True if an index is written as numbers and slices, which cannot name an attribute."""
    if isinstance(index, ast.Constant):
        return not isinstance(index.value, str)
    if isinstance(index, ast.Slice):
        return True
    if isinstance(index, ast.UnaryOp):
        return isinstance(index.operand, ast.Constant)
    return isinstance(index, ast.Tuple)


def _copied(part: Any) -> Any:
    """Return a copy of a syntax tree; `copy.deepcopy` takes longer than the rest of the compilation."""
    if isinstance(part, ast.AST):
        made = type(part).__new__(type(part))
        vars(made).update((name, _copied(each)) for name, each in vars(part).items())
        return made
    return [_copied(each) for each in part] if type(part) is list else part


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
    tree = ast.fix_missing_locations(Transformer(filename, lines).visit(tree))
    with warnings.catch_warnings():
        # Guards are constants, and the compiler warns about a call of a constant.
        warnings.filterwarnings("ignore", "'str' object is not callable", SyntaxWarning)
        code: CodeType = compile(cast("Any", tree), filename, mode, dont_inherit=True)
    return _with_guards(code, guards)


def _with_guards(code: CodeType, guards: Mapping[str, Callable[..., Any]]) -> CodeType:
    constants = tuple(
        _with_guards(constant, guards)
        if isinstance(constant, CodeType)
        else guards[constant[len(_TOKEN) :]]
        if isinstance(constant, str) and constant.startswith(_TOKEN)
        else constant
        for constant in code.co_consts
    )
    return code.replace(co_consts=constants)
