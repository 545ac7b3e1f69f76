"""Paths of modules as users write them in a trace, by nnsight generation.

nnsight exposes modules under their own names. Every module also has values, such as `output`. If a module
has such a name, 0.8 renames the module (`E_output`), and 0.7 and 0.6 rename the value (`nns_output`).
`tests/clients/test_model_pages.py` resolves such paths with the clients themselves.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ndif.schema.structure import ModuleNode

ROOT = "model"
"""The name of a model in a trace."""
MOVED_MODULES = frozenset(
    ("device", "devices", "input", "inputs", "iter", "output", "parent", "root", "source")
)
"""Names of modules that nnsight 0.8 renames."""
_PREFIX_OF_MODULES, _PREFIX_OF_VALUES = "E_", "nns_"
VALUES = ("output", "input", "inputs", "source")
"""Values that every module has in a trace."""


@dataclass(frozen=True, slots=True)
class Place:
    """A module of a model's structure, with its path in one nnsight generation."""

    path: str
    node: ModuleNode
    generation: str

    def children(self) -> Iterator[Place]:
        """Yield the direct children, in order."""
        counted = is_counted(self.node)
        for child in self.node.children:
            step = _step(child.name, self.generation, counted=counted)
            yield Place(self.path + step, child, self.generation)

    def value(self, name: str) -> str:
        """Return the name by which a trace reads the value `name`, one of `VALUES`, of this module."""
        return self.renamed.get(name, name)

    @property
    def renamed(self) -> Mapping[str, str]:
        """Values that nnsight renames on this module: the name in a trace, by the usual name."""
        if _moves_modules(self.generation):
            return {}
        below = {child.name for child in self.node.children}
        return {name: f"{_PREFIX_OF_VALUES}{name}" for name in VALUES if name in below}

    def at(self, index: int) -> Place:
        """Return the sibling at `index` in the same container; the sibling must share this node."""
        head, bracket, _ = self.path.rpartition("[")
        return Place(f"{head}{bracket}{index}]", self.node, self.generation) if bracket else self


def is_counted(node: ModuleNode) -> bool:
    """Return True if a module's children are numbered from 0 without a gap, so that clients index them."""
    runs = sorted(run for child in node.children for run in child.indices or ((-1, -1),))
    if node.omitted or not runs:
        return False
    expected = 0
    for first, last in runs:
        if first != expected:
            return False
        expected = last + 1
    return True


def _step(name: str, generation: str, *, counted: bool) -> str:
    """Return the suffix that leads from the parent's path to a child's."""
    if counted:
        return f"[{name}]"
    if name in MOVED_MODULES and _moves_modules(generation):
        name = f"{_PREFIX_OF_MODULES}{name}"
    if name.isidentifier() and not keyword.iskeyword(name):
        return f".{name}"
    return f".get({literal(name)})"


def _moves_modules(generation: str) -> bool:
    return generation not in ("0.6", "0.7")


def literal(text: str) -> str:
    """Return a Python string literal for `text`: on one line, with invisible characters escaped."""
    quoted = repr(text)
    # Double quotes where possible, as researchers write them.
    return f'"{quoted[1:-1]}"' if quoted[0] == "'" and '"' not in quoted else quoted
