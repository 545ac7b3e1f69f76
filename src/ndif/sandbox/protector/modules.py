"""Modules as a block sees them: an immutable wrapper for a whitelisted one, a placeholder for any other."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

from ndif.sandbox.advice import send_along
from ndif.sandbox.protector import libraries, safe_modules
from ndif.sandbox.protector.names import Variables, words
from ndif.sandbox.protector.placeholders import Placeholder
from ndif.sandbox.protector.whitelist import Whitelist, WhitelistedModule

_PUBLIC_DUNDERS = words("__name__ __doc__ __version__")
_OF_USER_MODULES = words("__doc__ __package__ __all__ __version__")

_TRUSTED_ORIGINS = words("abc typing typing_extensions types _abc functools")
"""Modules whose values every whitelisted module may hold."""

_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), tuple, list, dict, set, frozenset, range
)  # fmt: skip

_GUARDED: Mapping[str, Callable[[Whitelist], None]] = {
    "sympy": lambda _: libraries.guard_sympy(),
    "pandas": libraries.guard_pandas,
    "scipy": lambda _: libraries.guard_scipy(),
    "sklearn": lambda _: libraries.guard_scikit(),
    "torch.utils.data": lambda _: libraries.guard_data_loaders(),
}
"""Guards of libraries, by the library or module that a block imports."""

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType)

_BACKING: dict[int, tuple[Modules, ModuleType, str]] = {}
"""The module behind each wrapper, by the wrapper's id: a block cannot reach it from the wrapper.

Wrappers are never deleted, so an id is never reused.
"""


class _ReferredToByName(ModuleType):
    """A module that is pickled by name, because the user's process has it, too."""

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)

    # `__reduce__` serves the user's own process; a copy made by it would be a module of the server.
    def __deepcopy__(self, *_: object) -> ModuleType:
        return self

    __copy__ = __deepcopy__


class ProtectedModule(_ReferredToByName):
    """A read-only view of a whitelisted module's public attributes.

    The wrapper's own dictionary has the permitted attributes, so an access costs the same as on the module.
    Submodules, and attributes that a module computes on access, pass through `Modules.attribute`.
    """

    def __getattr__(self, name: str) -> Any:
        modules, module, path = _BACKING[id(self)]
        return modules.attribute(module, path, name)

    def __setattr__(self, name: str, *_: object) -> NoReturn:
        raise AttributeError(
            f"cannot modify the module {self.__name__!r}: it is protected on this server"
        )

    __delattr__ = __setattr__

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}>"

    def __dir__(self) -> list[str]:
        _, module, _ = _BACKING[id(self)]
        return sorted(name for name in dir(module) if not name.startswith("_"))


class SyntheticModule(ProtectedModule):
    """A read-only module without a file: the builtins of a block, or a stand-in for a module."""

    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        super().__init__(name)
        object.__getattribute__(self, "__dict__").update(content)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__}.{name} is not available on this server")

    def __dir__(self) -> list[str]:
        return sorted(object.__getattribute__(self, "__dict__"))


class UserModule(_ReferredToByName):
    """A module of the user's own, which came with the request."""


class Modules:
    """The modules that a block may import.

    Owns the wrappers of whitelisted modules, the user's own modules, and the table of values that are
    denied or replaced in every module. Asks the whitelist about permissions.
    """

    def __init__(self, whitelist: Whitelist) -> None:
        self._whitelist = whitelist
        self._wrappers: dict[str, ProtectedModule] = {}
        self._replacements: dict[int, tuple[Any, Any]] = {}
        """Values and their replacements in a block, by the value's id."""
        self._denied: dict[int, tuple[Any, str]] = {}
        """Denied values and the reasons, by the value's id."""
        self.users: dict[str, UserModule] = {}
        """The user's own modules, by name."""
        self.builtins: ModuleType | None = None
        self._console = safe_modules.Console()
        for entry in whitelist.modules.values():
            self._deny(entry)

    def begin(self) -> None:
        """Forget the last request's modules and logging levels."""
        self.users.clear()
        self._console.begin()

    def replace(self, original: object, value: object) -> None:
        """Give a block `value` wherever a module holds `original`."""
        self._replacements[id(original)] = (original, value)

    def replaced(self) -> Iterator[tuple[Any, str, str]]:
        """Yield each replacement in a block, with module and name of its original."""
        for original, value in self._replacements.values():
            yield value, original.__module__, original.__qualname__
        for name, value in vars(self.builtins).items() if self.builtins is not None else ():
            if not name.startswith("_") and getattr(builtins, name) is not value:
                yield value, "builtins", name

    def _deny(self, entry: WhitelistedModule) -> None:
        """Record the values that an entry denies, because other modules may hold them under other names."""
        for path, reason in entry.denied.items():
            above, _, name = f"{entry.name}.{path}".rpartition(".")
            # `vars`, because with `getattr` a module that computes attributes on access may import others.
            value = vars(sys.modules[above]).get(name) if above in sys.modules else None
            if callable(value) and not isinstance(value, ModuleType):
                self._denied[id(value)] = value, reason

    def get(self, name: str) -> ModuleType:
        """Return the wrapper of a whitelisted module, a user's module, or else a placeholder."""
        if name in ("builtins", "__builtins__") and self.builtins is not None:
            return self.builtins
        module = self.users.get(name) or self._wrappers.get(name)
        if module is not None:
            return module
        if name in safe_modules.NAMES:
            return self._stand_in(name)
        if not self._permits(name):
            return Placeholder(name, self.refusal(name))
        try:
            return self._wrap(importlib.import_module(name), name)
        except ModuleNotFoundError as error:
            absent = (error.name or "").partition(".")[0] == name.partition(".")[0]
            if not absent:
                raise
            return Placeholder(name, self.refusal(name))

    def _stand_in(self, name: str) -> ModuleType:
        stand_in = SyntheticModule(name, safe_modules.contents(name, self._console))
        self._wrappers[name] = stand_in
        submodules = [
            submodule for submodule in safe_modules.NAMES if submodule.rpartition(".")[0] == name
        ]
        object.__getattribute__(stand_in, "__dict__").update(
            (submodule.rpartition(".")[2], self.get(submodule)) for submodule in submodules
        )
        return stand_in

    def _permits(self, name: str) -> bool:
        """Return True if a block may import a module, provided that it is installed."""
        return self._whitelist.find(name) is not None or self._has_whitelisted_submodule(name)

    def refusal(self, name: str, attribute: str = "") -> str:
        """Return a sentence that explains why a block does not get a module, or an attribute of it."""
        root = name.partition(".")[0]
        sentence = f"module {name!r} is not available on this server"
        entry = self._whitelist.modules.get(root)
        reason = entry and entry.reason(name)
        if reason:
            return f"{sentence}: {reason}"
        if not is_installed(root):
            if self._permits(name):
                return f"{sentence}: its operator has not installed it (ndif's extra `science`)"
            return f"{sentence}. {send_along(name, attribute)}; you can import: {self.available()}"
        return f"{sentence}; you can import: {self.available()}"

    def available(self) -> str:
        """Return the names of the installed top-level modules that a block may import, for an error."""
        names = {*self._whitelist.modules, *safe_modules.NAMES}
        roots = {name.partition(".")[0] for name in names}
        return ", ".join(
            sorted(root for root in roots if not root.startswith("_") and is_installed(root))
        )

    def make(self, name: str, variables: Variables) -> UserModule:
        """Make a module of the user's own; replaces `cloudpickle.dynamic_subimport`."""
        module = UserModule(name)
        vars(module).update(
            (key, value)
            for key, value in variables.items()
            if not key.startswith("__") or key in _OF_USER_MODULES
        )
        self.users[name] = module
        return module

    def _has_whitelisted_submodule(self, name: str) -> bool:
        return any(entry.startswith(name + ".") for entry in self._whitelist.modules)

    def wrap(self, module: ModuleType) -> ModuleType:
        """Return the wrapper of a module that an attribute holds.

        Raises:
            AttributeError: If the module is not whitelisted.
        """
        if isinstance(module, ProtectedModule | Placeholder | UserModule):
            return module
        name = module.__name__
        if name in safe_modules.NAMES or (name == "builtins" and self.builtins is not None):
            return self.get(name)
        if self._whitelist.find(name) is None:
            raise AttributeError(f"the {self.refusal(name)}")
        return self._wrap(module, name)

    def _wrap(self, module: ModuleType, name: str) -> ProtectedModule:
        cached = self._wrappers.get(name)
        if cached is not None and _BACKING[id(cached)][1] is module:
            return cached
        root = name.partition(".")[0]
        guard = _GUARDED.get(root) or _GUARDED.get(name)
        if guard is not None:
            guard(self._whitelist)
        entry = self._whitelist.modules.get(root)
        if entry is not None:
            self._deny(entry)
        wrapper = ProtectedModule(name, module.__doc__)
        _BACKING[id(wrapper)] = (self, module, name)
        own = object.__getattribute__(wrapper, "__dict__")
        for key, value in list(vars(module).items()):
            own.pop(key, None)
            # Submodules, which may be large, are wrapped on access.
            if not isinstance(value, ModuleType):
                with contextlib.suppress(AttributeError, ImportError):
                    own[key] = self._permitted(name, key, value)
        exported = getattr(module, "__all__", None)
        if exported is not None:
            own["__all__"] = [key for key in exported if key in own]
        self._wrappers.setdefault(name, wrapper)
        return wrapper

    def stored(self, wrapper: ProtectedModule, name: str) -> Any:
        """Return a module's own attribute whose name nnsight also adds to every object, such as `save`."""
        own = object.__getattribute__(wrapper, "__dict__")
        return own[name] if name in own else type(wrapper).__getattr__(wrapper, name)

    def attribute(self, module: ModuleType, path: str, name: str) -> Any:
        """Return an attribute of a whitelisted module.

        Raises:
            AttributeError: If the module does not have it, or a block may not use it.
        """
        if name == "__all__" or (name.startswith("__") and name not in _PUBLIC_DUNDERS):
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        self._permitted(path, name, None)
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            return self._permitted(path, name, value)
        below = f"{path}.{name}"
        if type(value) is not ModuleType and self._whitelist.find(below) is not None:
            return self._wrap(value, below)
        try:
            return self.wrap(value)
        except AttributeError as error:
            raise AttributeError(f"{path}.{name}: {error}") from None

    def _permitted(self, path: str, name: str, value: Any) -> Any:
        """Return `value` or its replacement; raise AttributeError if a block may not use it."""
        if name in _PUBLIC_DUNDERS:
            return value
        if name.startswith("_"):
            raise AttributeError(
                f"{path}.{name} is private to its module and not available on this server"
            )
        dotted = f"{path}.{name}"
        unavailable = f"{dotted} is not available on this server"
        entry = self._whitelist.find(path)
        if entry is None:
            if self._has_whitelisted_submodule(dotted) or self._whitelist.find(dotted):
                return value
            raise AttributeError(unavailable)
        if entry.only is not None and name not in entry.only:
            if self._has_whitelisted_submodule(dotted):
                return value
            available = ", ".join(sorted(entry.only))
            raise AttributeError(f"{unavailable}; available from {path}: {available}")
        _, reason = self._denied.get(id(value), (None, None))
        if dotted not in self._whitelist.modules:
            reason = entry.reason(dotted) or reason
        if reason:
            raise AttributeError(f"{unavailable}: {reason}")
        if id(value) in self._replacements:
            return self._replacements[id(value)][1]
        origin = _origin(value)
        if origin is not None and not self._is_permitted_origin(origin):
            raise AttributeError(
                f"{dotted} belongs to the module {origin!r}, which is not available on this server"
            )
        return value

    def _is_permitted_origin(self, name: str) -> bool:
        if name in _TRUSTED_ORIGINS:
            return True
        root = name.partition(".")[0]
        public = root.lstrip("_")
        entries = (
            self._whitelist.modules.get(candidate) for candidate in (root, public, "_" + public)
        )
        entry = next(filter(None, entries), None)
        if entry is None:
            return False
        if entry.only is not None:
            return self._whitelist.find(name) is not None or root == "nnsight"
        if any(name == home or name.startswith(f"{home}.") for home in entry.homes):
            return True
        return entry.strict or entry.reason(name) is None or name.startswith(f"{root}._")

    def importer(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Import a module for a block; replaces the builtin `__import__`."""
        if level:
            package = (globals or {}).get("__package__") or ""
            name = importlib.util.resolve_name("." * level + name, package)
        module = self.get(name)
        if isinstance(module, Placeholder):
            return module
        if not fromlist:
            root = name.partition(".")[0]
            return module if root == name else self.get(root)
        if isinstance(module, ProtectedModule):
            for attribute in fromlist:
                self._import_from(module, name, attribute)
        return module

    def _import_from(self, module: ProtectedModule, name: str, attribute: str) -> None:
        """Let `from name import attribute` find a permitted value, without its fallback, `sys.modules`."""
        if attribute == "*":
            return
        try:
            getattr(module, attribute)
        except AttributeError as error:
            below = f"{name}.{attribute}"
            is_package = hasattr(sys.modules.get(name), "__path__")
            if is_package and self._whitelist.find(below) and importlib.util.find_spec(below):
                object.__getattribute__(module, "__dict__")[attribute] = self.get(below)
                return
            raise ImportError(str(error)) from None


@functools.cache
def is_installed(root: str) -> bool:
    """Return True if this process can import a top-level module."""
    try:
        return root in sys.modules or importlib.util.find_spec(root) is not None
    except ValueError:
        return False


def _origin(value: Any) -> str | None:
    """Return the name of the module that defines a value; None for plain values, allowed everywhere."""
    if type(value) in _PLAIN:
        return None
    # An instance has its class's module; a function that Cython compiled has its own.
    name = getattr(value, "__module__", None)
    if name is None and not isinstance(value, _CODE):
        name = type(value).__module__
    if name == "builtins":
        # Builtin types, and instances of them, are harmless; builtin functions are checked.
        return "builtins" if isinstance(value, BuiltinFunctionType | FunctionType) else None
    return name if isinstance(name, str) else None
