"""The Protector: what a block's own Python may reach.

It turns the source of a user's code into code that asks a guard before it touches an attribute whose object
may lead further, gives it builtins and modules of a whitelist, and reads payloads that hold nothing else.
nnsight's, torch's and transformers' own code is not touched and runs as always: a guard is part of the
user's code, not of the process.

The kernel is the boundary; this is the layer above it, and gives errors that a user understands. What it
does not claim: to stop tricks with native memory inside torch or numpy (an index that a kernel of theirs
does not check), to bound time or memory, to see through every function of a whitelisted library that takes
a text for code or for an attribute's name (those that are known are denied, or see `libraries`), or to
keep a user from changing the weights of a disposable process through a torch function that was handed a
module.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ndif.sandbox.protector import unpickling
from ndif.sandbox.protector.builtins import Builtins, SafeBuiltins
from ndif.sandbox.protector.definitions import Definitions
from ndif.sandbox.protector.foresight import foreseen
from ndif.sandbox.protector.guards import Guards
from ndif.sandbox.protector.modules import Modules, ProtectedModule, UnauthorizedModule
from ndif.sandbox.protector.objects import ProtectedObjects
from ndif.sandbox.protector.passages import Passage
from ndif.sandbox.protector.transformer import compile_guarded
from ndif.sandbox.protector.unpickling import Finder, ForbiddenError, SafeUnpickler
from ndif.sandbox.protector.whitelist import Whitelist, WhitelistedModule

__all__ = [
    "ForbiddenError",
    "ProtectedModule",
    "ProtectedObjects",
    "Protector",
    "SafeBuiltins",
    "UnauthorizedModule",
    "WhitelistedModule",
]

_EAGER = ("torch", "torch.nn", "torch.nn.functional", "numpy", "math", "collections", "typing")
"""Modules that a block is likely to use: their wrappers are made before it comes."""


class Protector:
    """The policy for the code of one user at a time; see the module."""

    def __init__(self, extra: Path | None = None) -> None:
        """`extra` is the operator's whitelist, in the form of whitelist.yaml.

        Raises:
            ValueError: if it cannot be used.
        """
        self._whitelist = Whitelist.read(extra)
        self._modules = Modules(self._whitelist, {})
        self._protected = ProtectedObjects(self._whitelist.model, self._whitelist.nnsight)
        self._guards = Guards(self._whitelist, self._modules, self._protected)
        builtins = Builtins(self._guards, self._modules.importer, self._compiled)
        self._modules.builtins = builtins.module()
        for path, value in builtins.replacements().items():
            module, _, name = path.rpartition(".")
            self._modules.replace(getattr(sys.modules[module], name), value)
        self._definitions = Definitions(self._guards, builtins.classes)
        self._table = self._guards.table()
        self._foreseeing = False
        self._foreseen: list[Passage] = []
        for name in _EAGER:
            self._modules.get(name)

    @property
    def builtins(self) -> dict[str, Any]:
        """What `__builtins__` is for a user's code."""
        return self._guards.builtins

    # --- code ---------------------------------------------------------------------------------------

    def _compiled(self, source: str | ast.AST, filename: str, mode: str) -> CodeType:
        return compile_guarded(source, filename, mode, self._table)

    def compile(
        self,
        source: str | ast.AST,
        filename: str = "<block>",
        mode: str = "exec",
        *_: Any,
        **__: Any,
    ) -> CodeType:
        """`compile` for a user's code.

        Raises:
            SyntaxError: if it is not Python, or more than a block may be.
        """
        return self._compiled(source, filename, mode)

    def execute(self, code: CodeType, scope: dict[str, Any], local: Any = None) -> None:
        """`exec` for code that `compile` made."""
        # Of a scope that is a subclass of dict, Python too sets it past the class.
        dict.__setitem__(scope, "__builtins__", self._guards.builtins)
        exec(code, scope, scope if local is None else local)  # noqa: S102 - it is guarded

    def adopt(self, function: Any, names: Mapping[str, Any]) -> Any:
        """See `Definitions.adopt`."""
        return self._definitions.adopt(function, names)

    def fill(self, function: Any, names: Mapping[str, Any]) -> None:
        """See `Definitions.fill`."""
        self._definitions.fill(function, names)

    def scope(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """See `Definitions.scope`."""
        return self._definitions.scope(names)

    def runs(self, function: Any) -> bool:
        """Whether a function is the user's own, sent as source."""
        return self._definitions.made_here(function)

    def filename(self, name: object) -> str:
        """The file of a user's code, by a name that no file of this server's libraries has.

        Its lines become known under that name; those of a library must not be taken for the user's.
        """
        text = str(name)
        if os.path.normpath(text).startswith(_libraries()):
            return f"<client>{text}"
        return text

    def check_call(self, name: str) -> None:
        """See that a method of the model may be called by this name.

        Raises:
            AttributeError: if not.
        """
        own = name == "__call__" or name.startswith("__nnsight_")
        if not own and (name.startswith("_") or self._protected.denies(name)):
            raise AttributeError(f"the model's method {name!r} is not available on this server")

    # --- payloads ---------------------------------------------------------------------------------

    def objects(self, persistent: Mapping[str, Any]) -> dict[str, Any]:
        """Protect what of the server's a payload may refer to; the same objects."""
        self._protected.hold(persistent)
        self._modules.users.clear()
        return dict(persistent)

    def unpickler(
        self, ordinary: type, rebuilders: Mapping[tuple[str, str], Any]
    ) -> Callable[[Any, Mapping[str, Any] | None], Any]:
        """What stands for the class `ordinary`: called with a file and the persistent objects.

        `rebuilders` stand for functions of an nnsight generation, by module and name.
        """
        finder = Finder(
            self._whitelist,
            self._modules,
            self._guards,
            {**self._definitions.rebuilders(), **self._rebuilders(), **rebuilders},
        )

        def made(file: Any, persistent: Mapping[str, Any] | None = None) -> SafeUnpickler:
            if not self._foreseeing:
                return SafeUnpickler(file, finder, persistent or {}, self._foreseen)
            passage = foreseen(file.getvalue(), finder, persistent or {})
            self._foreseen = [] if passage is None else [passage]
            return SafeUnpickler(file, finder, persistent or {})

        return made

    @contextmanager
    def foreseeing(self) -> Iterator[None]:
        """While it lasts, payloads are the server's own, and like those that will come to its forks.

        What such have in common is read now, for one payload of each fork.
        """
        self._foreseeing = True
        try:
            yield
        finally:
            self._foreseeing = False

    def _rebuilders(self) -> dict[tuple[str, str], Any]:
        cloud = "cloudpickle.cloudpickle"
        return {
            ("torch.storage", "_load_from_bytes"): unpickling.load_tensors,
            ("torch._tensor", "_rebuild_from_type_v2"): unpickling.rebuild_from_type(self._guards),
            ("copyreg", "_reconstructor"): unpickling.reconstruct,
            ("copyreg", "__newobj__"): unpickling.new_object,
            ("_codecs", "encode"): unpickling.encode,
            ("types", "MethodType"): unpickling.bound,
            ("torch._C", "_VariableFunctionsClass"): self._modules.get("torch"),
            (cloud, "subimport"): unpickling.import_for(self._modules),
            (cloud, "dynamic_subimport"): unpickling.module_for(self._modules),
            ("nnsight.intervention.serialization", "_make_dataclass_skeleton"): (
                self._definitions.dataclass_skeleton
            ),
        }

    # --- where nnsight compiles and runs --------------------------------------------------------------

    @contextmanager
    def guarding(
        self, modules: Sequence[ModuleType], replaced: Sequence[tuple[Any, str, Any]] = ()
    ) -> Iterator[None]:
        """While it lasts, `compile` and `exec` of these modules of nnsight are those of a user's code.

        `replaced` are further attributes, with what they are meanwhile.
        """
        changes = [
            (module, name, value)
            for module in modules
            for name, value in (("compile", self.compile), ("exec", self.execute))
        ]
        before = []
        for owner, name, value in [*changes, *replaced]:
            before.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in reversed(before):
                if value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)


_ABSENT = object()


@functools.cache
def _libraries() -> tuple[str, ...]:
    """The folders that this server's modules are from.

    Not the modules' own files: to ask each of them would copy a page of memory for each in every runner.
    """
    named = (sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    return tuple({f"{os.path.normpath(folder)}/" for folder in (*named, *sys.path) if folder})
