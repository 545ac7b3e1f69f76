"""The shape of classes: private names are used only in their class, and no constructor is long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ndif

SOURCE = Path(ndif.__file__).parent
FOREIGN = {
    "os._exit",
    "os.environ._data",
    "row._mapping",  # SQLAlchemy documents it
    "serialization._fill",
    "tracing._saves",
    "part._edits",
    "model._call",
    "self._model._call",
    "TransformersModel._call",
}
"""Private names of Python, SQLAlchemy and nnsight that a class of ndif has, too."""


def own_names(kind: ast.ClassDef) -> set[str]:
    """Return the private names that a class defines: methods, fields, attributes of `self`."""
    names = set[str]()
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def reaches(node: ast.AST, inside: frozenset[str], ours: set[str]) -> Iterator[ast.Attribute]:
    """Yield each use of an own private name outside of the classes that define it."""
    for child in ast.iter_child_nodes(node):
        names = inside | own_names(child) if isinstance(child, ast.ClassDef) else inside
        if isinstance(child, ast.Attribute) and child.attr in ours - inside:
            is_own = ast.unparse(child.value) in ("self", "cls", "super()")
            if not is_own and ast.unparse(child) not in FOREIGN:
                yield child
        yield from reaches(child, names, ours)


def test_no_line_uses_private_name_of_another_object() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    classes = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    ours = set[str]().union(*map(own_names, classes))
    assert {"_work", "_jobs"} <= ours
    findings = [
        f"{path.relative_to(SOURCE)}:{access.lineno}: {ast.unparse(access)}"
        for path, tree in trees.items()
        for access in reaches(tree, frozenset(), ours)
    ]
    assert not findings, "\n".join(findings)


def test_checker_finds_use_of_private_name() -> None:
    tree = ast.parse("class A:\n def _b(self): other._b()\n\nclass C:\n def d(self, a): a._b()\n")
    (access,) = reaches(tree, frozenset(), {"_b"})
    assert (access.lineno, ast.unparse(access)) == (5, "a._b")


def test_no_constructor_is_longer_than_40_lines() -> None:
    long = [
        f"{path.relative_to(SOURCE)}: {kind.name}"
        for path in SOURCE.rglob("*.py")
        for kind in ast.walk(ast.parse(path.read_text()))
        if isinstance(kind, ast.ClassDef)
        for statement in kind.body
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__"
        if (statement.end_lineno or 0) - statement.lineno >= 40
    ]
    assert not long, "\n".join(long)
