"""The Protector: the language policy for users' code.

The Protector compiles a user's source into code that calls a guard before each attribute access that may
lead out of the block. It gives that code only whitelisted builtins and modules, and unpickles only payloads
of such objects. Guards are part of the user's code, not of the process: nnsight, torch and transformers are
compiled without them.

The kernel's confinement is the boundary. The Protector is a second layer above it, whose errors a user
understands. It does not defend:

- native memory inside torch or numpy, for example an index that one of their kernels does not check;
- time and memory;
- unknown whitelisted functions that take a string for code or for an attribute's name (the known ones are
  denied, or replaced in `libraries`);
- the weights of a disposable process against a torch function that takes a module.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ndif.sandbox.protector import unpickling
from ndif.sandbox.protector.audit import PermittedPaths, refuse_effects
from ndif.sandbox.protector.builtins import Builtins
from ndif.sandbox.protector.definitions import Definitions, copied
from ndif.sandbox.protector.guards import AccessGuards
from ndif.sandbox.protector.modules import Modules
from ndif.sandbox.protector.names import Variables
from ndif.sandbox.protector.objects import ProtectedObjects
from ndif.sandbox.protector.payload_prefix import CachedPrefix
from ndif.sandbox.protector.transformer import compile_guarded, compile_plain, nested
from ndif.sandbox.protector.unpickling import GlobalResolver, SafeUnpickler
from ndif.sandbox.protector.whitelist import Whitelist

_EAGER = (
    *(
        "torch",
        "torch.nn",
        "torch.nn.functional",
        "torch.utils.data",
        "numpy",
        "math",
        "collections",
    ),
    *("typing", "logging", "tqdm"),
)
"""Modules that a block is likely to use; their wrappers are made before the first block arrives."""


class Protector:
    """The policy for the code of one user at a time.

    Owns the whitelist and its tables. Asks `AccessGuards` about attributes, `Modules` about imports,
    `ProtectedObjects` about the model, and `Definitions` for functions and classes in a payload. The
    kernel's confinement guards files, sockets, processes and limits.
    """

    def __init__(self, extra: Path | None = None) -> None:
        """Read the whitelist, and the operator's additions in `extra`, a file of the same form.

        Raises:
            ValueError: If a file cannot be read or has another form.
        """
        self._whitelist = Whitelist.read(extra)
        self._modules = Modules(self._whitelist)
        self._protected = ProtectedObjects()
        self._guards = AccessGuards(self._whitelist, self._modules, self._protected)
        self.builtins = self._guards.builtins
        """The value of `__builtins__` in a user's code."""
        builtins = Builtins(self._guards, self._modules, self.compile)
        self._definitions = Definitions(self._guards, builtins.classes)
        self.adopt = self._definitions.adopt
        self.fill = self._definitions.fill
        self.scope = self._definitions.scope
        self.runs = self._definitions.runs
        self.rebuilders = self._definitions.rebuilders
        self.is_from_request = self._definitions.is_from_request
        self.follow = self._guards.follow
        self._table = self._guards.table()
        self._compiled: list[tuple[CodeType, str | ast.AST, str, str]] = []
        """This request's code objects that contain functions, with the arguments of their compilation."""
        self._stand_ins: dict[int, tuple[Any, str, str]] = {}
        """The stand-ins of a block, by id, with the modules and names of their originals."""
        self._caches_prefix = False
        self._prefix: CachedPrefix | None = None
        for name in _EAGER:
            self._modules.get(name)

    def enter(self, permitted: PermittedPaths) -> None:
        """Refuse other files, programs and connections in this process; call once the model is loaded."""
        refuse_effects(permitted)

    def compile(
        self, source: str | ast.AST, filename: str, mode: str = "exec", *_: Any, **__: Any
    ) -> CodeType:
        """Compile a user's code with guards; replaces the builtin `compile`.

        Raises:
            SyntaxError: If `source` is not Python, or uses syntax that a block may not use.
        """
        code = compile_guarded(source, filename, mode, self._table)
        if nested(code):
            self._compiled.append((code, source, filename, mode))
        return code

    def original(self, value: object) -> tuple[str, str] | None:
        """Return module and name of the object that `value` replaces in a block, or None."""
        if not self._stand_ins:
            # A user's metaclass derives from the class that replaces `type`.
            kinds = (type(self.builtins["type"]), "builtins", "type")
            self._stand_ins = {
                id(replacement[0]): replacement
                for replacement in (*self._modules.replaced(), kinds)
            }
        stand_in = self._stand_ins.get(id(value))
        return None if stand_in is None else (stand_in[1], stand_in[2])

    def unguarded(self, function: FunctionType) -> FunctionType:
        """Return a copy of a function without guards, as in the user's process; unchanged if it has none.

        Raises:
            PicklingError: If its source is not known.
        """
        if not self._guards.own_function(function):
            return function
        for code, source, filename, mode in self._compiled:
            plain = compile_plain(function.__code__, code, source, filename, mode)
            if plain is not None:
                return copied(function, plain)
        raise pickle.PicklingError(
            f"the function {function.__name__!r} was made in the block, and its source is not known"
        )

    def execute(self, code: CodeType, scope: Variables, local: Any = None) -> None:
        """Execute code from `compile`; replaces the builtin `exec`."""
        # Python ignores the overrides of a dict subclass when it reads this key, so ignore them here, too.
        dict.__setitem__(scope, "__builtins__", self.builtins)
        exec(code, scope, scope if local is None else local)  # noqa: S102 - it is guarded

    def filename(self, name: object) -> str:
        """Return a file name for a user's code that is not the name of a library's file.

        Tracebacks look up lines by file name, and must not show a library's lines as the user's.
        """
        text = str(name)
        if os.path.normpath(text).startswith(_libraries()):
            return f"<client>{text}"
        return text

    def check_call(self, model: Any, name: str) -> None:
        """Check that a request may call a method of the model, or of a part of it.

        Raises:
            AttributeError: If the method is private or denied.
        """
        is_nnsight_call = name == "__call__" or name.startswith("__nnsight_")
        denied = name in self._whitelist.model or name in self._whitelist.nnsight
        if not is_nnsight_call and (name.startswith("_") or denied):
            raise AttributeError(f"the model's method {name!r} is not available on this server")
        self._guards.check(model, name)

    def check_instrumented(self, function: Any) -> None:
        """Check that `.source` may recompile a function, which it does without guards.

        Raises:
            TypeError: If a library does not define the function.
        """
        for find in (lambda wrapper: wrapper, inspect.unwrap):
            target: Any = find(function)
            if type(target) is MethodType:
                target = target.__func__
            if type(target) is not FunctionType or self._guards.own_function(target):
                raise TypeError(
                    ".source is available on this server for functions of the model and its libraries, not "
                    "for functions that your own code defines"
                )
            # A payload may have cached other lines under this file name; a library's lines are on disk.
            linecache.cache.pop(target.__code__.co_filename, None)

    def objects(self, persistent: Mapping[str, Any]) -> dict[str, Any]:
        """Forget the last request; protect and return the server's objects that a payload may refer to."""
        self._protected.hold(persistent)
        self._modules.begin()
        self._compiled.clear()
        return dict(persistent)

    def unpickler(
        self, rebuilders: Mapping[tuple[str, str], Any]
    ) -> Callable[[Any, Mapping[str, Any] | None], Any]:
        """Return a factory of unpicklers, called like their class with a file and persistent objects.

        `rebuilders` replace functions of an nnsight generation, by module and name.
        """
        replaced = {**self._definitions.rebuilders(), **self._rebuilders(), **rebuilders}
        resolver = GlobalResolver(self._whitelist, self._modules, self._guards, replaced)

        def make(file: Any, persistent: Mapping[str, Any] | None = None) -> SafeUnpickler:
            objects = persistent or {}
            if not self._caches_prefix:
                return SafeUnpickler(file, resolver, objects, self._prefix)
            self._prefix = unpickling.cache_prefix(file.getvalue(), resolver, objects)
            return SafeUnpickler(file, resolver, objects)

        return make

    @contextmanager
    def caching_prefix(self) -> Iterator[None]:
        """Cache the part that payloads in this context share with payloads to forked processes.

        Only the server's own payloads may be decoded in this context.
        """
        self._caches_prefix = True
        try:
            yield
        finally:
            self._caches_prefix = False

    def decode_ahead(self) -> None:
        """Decode the cached part for the next payload before it arrives."""
        if self._prefix is not None:
            self._prefix.decode_ahead()

    def forget_decoded(self) -> None:
        """Drop the result of `decode_ahead` if no payload has used it."""
        if self._prefix is not None:
            self._prefix.forget()

    def _rebuilders(self) -> dict[tuple[str, str], Any]:
        cloud = "cloudpickle.cloudpickle"
        return {
            ("torch.storage", "_load_from_bytes"): unpickling.load_tensors,
            ("torch._tensor", "_rebuild_from_type_v2"): unpickling.rebuild_from_type,
            ("copyreg", "_reconstructor"): unpickling.reconstruct,
            ("copyreg", "__newobj__"): unpickling.new_object,
            ("_codecs", "encode"): unpickling.encode,
            ("re", "_compile"): unpickling.compile_pattern,
            # Pickles of a tensor's methods in C refer to this class.
            ("torch._C", "TensorBase"): torch.Tensor,
            ("types", "MethodType"): unpickling.bound,
            ("torch._C", "_VariableFunctionsClass"): self._modules.get("torch"),
            ("torch.utils._contextlib", "_DecoratorContextManager.clone"): unpickling.clone_context,
            # A text annotation, which only a client's `typing.get_type_hints` would evaluate.
            ("typing", "ForwardRef"): unpickling.IgnoredObject,
            (cloud, "subimport"): self._modules.get,
            (cloud, "dynamic_subimport"): self._modules.make,
            ("nnsight.intervention.serialization", "_make_dataclass_skeleton"): (
                self._definitions.dataclass_skeleton
            ),
        }

    @contextmanager
    def guarding(
        self, modules: Sequence[ModuleType], replaced: Sequence[tuple[Any, str, Any]] = ()
    ) -> Iterator[None]:
        """Replace `compile` and `exec` in modules of nnsight by the guarded ones while the context lasts.

        Args:
            modules: Modules that compile and run blocks.
            replaced: Further attributes to replace: owner, name and value.
        """
        changes = [
            (module, name, value)
            for module in modules
            for name, value in (("compile", self.compile), ("exec", self.execute))
        ]
        with ExitStack() as restored:
            for owner, name, value in [*changes, *replaced]:
                if name in vars(owner):
                    restored.callback(setattr, owner, name, vars(owner)[name])
                else:
                    restored.callback(delattr, owner, name)
                setattr(owner, name, value)
            yield


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of the server's libraries.

    Loaded modules are not inspected, because that would copy a page of memory for each in every runner.
    """
    folders = (sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    return tuple({f"{os.path.normpath(folder)}/" for folder in (*folders, *sys.path) if folder})
