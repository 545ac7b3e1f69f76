"""sympy turns text into expressions by running it as Python; here only what an expression needs runs."""

from __future__ import annotations

import ast
import importlib
import sys
from types import BuiltinFunctionType
from typing import Any

_HARMLESS = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator,
    ast.unaryop, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.Tuple, ast.List, ast.Dict, ast.Set,
    ast.Attribute, ast.keyword, ast.Subscript, ast.Slice, ast.IfExp, ast.Starred,
)  # fmt: skip

_REFUSED = frozenset(
    {"lambdify", "sympify", "parse_expr", "preview", "plot", "S", "source", "test"}
)


def guard_sympy() -> None:
    """Have every text that becomes an expression in this process looked at before it runs."""
    if "sympy.parsing.sympy_parser" in sys.modules:
        parser: Any = sys.modules["sympy.parsing.sympy_parser"]
    else:
        parser = importlib.import_module("sympy.parsing.sympy_parser")
    parser.eval_expr = evaluate


def evaluate(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
    """sympy's `eval_expr` for the text that its parser made.

    Raises:
        SyntaxError: if it is more than an expression of calls, operators and numbers.
    """
    tree = ast.parse(code, mode="eval")
    for node in ast.walk(tree):
        allowed = isinstance(node, _HARMLESS)
        if isinstance(node, ast.Attribute):
            allowed = not node.attr.startswith("_")
        elif isinstance(node, ast.Name):
            allowed = not node.id.startswith("_") and node.id not in _REFUSED
        if not allowed:
            raise SyntaxError("a text for sympy must be an expression")
    names = {
        name: value
        for name, value in global_dict.items()
        if not isinstance(value, BuiltinFunctionType) and name not in _REFUSED
    }
    return eval(  # noqa: S307 - what is left of it is harmless
        compile(tree, "<sympy>", "eval"), {**names, "__builtins__": {}}, local_dict
    )
