"""Modules as a block sees them: whitelisted ones behind an immutable wrapper, others as a placeholder."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

from ndif.sandbox.protector.expressions import guard_sympy
from ndif.sandbox.protector.libraries import guard_pandas
from ndif.sandbox.protector.whitelist import Whitelist, WhitelistedModule

_PUBLIC_DUNDERS = frozenset({"__name__", "__doc__", "__version__"})

_HARMLESS_HOMES = frozenset({"abc", "typing", "typing_extensions", "types", "_abc", "functools"})
"""Where values may be from that a whitelisted module gives, besides whitelisted modules."""

_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    tuple,
    list,
    dict,
    set,
    frozenset,
    range,
)

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType)

_BACKING: dict[int, tuple[Modules, ModuleType, str]] = {}
"""What is behind a wrapper, by its id: not to be had from the wrapper itself. Wrappers live for ever."""


class ProtectedModule(ModuleType):
    """A whitelisted module: its public attributes, and no way to change them.

    What may be had is in the wrapper's own dictionary, so that an access costs what it costs on the
    module; what comes later (submodules, attributes that a module makes when asked) passes
    `Modules.attribute`.
    """

    def __getattr__(self, name: str) -> Any:
        modules, module, path = _BACKING[id(self)]
        return modules.attribute(module, path, name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"cannot modify the module {self.__name__!r}: it is protected")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot modify the module {self.__name__!r}: it is protected")

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}>"

    def __dir__(self) -> list[str]:
        _, module, _ = _BACKING[id(self)]
        return sorted(name for name in dir(module) if not name.startswith("_"))

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)

    # By `__reduce__`, which is for the user's own process, a copy would be the module itself.

    def __copy__(self) -> ProtectedModule:
        return self

    def __deepcopy__(self, memo: object) -> ProtectedModule:
        return self


class UnauthorizedModule(ModuleType):
    """Stands for a module that is not whitelisted: an import of it fails when it is used, not before."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name)
        object.__setattr__(self, "_why", why)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__reduce__", "__reduce_ex__"):
            return object.__getattribute__(self, name)
        if name == "__dict__":
            return {}
        if name.startswith("__") and name.endswith("__"):
            # Asked for by whoever handles any object, which is no use of the module.
            raise AttributeError(object.__getattribute__(self, "_why"))
        raise ImportError(object.__getattribute__(self, "_why"))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ImportError(object.__getattribute__(self, "_why"))

    def __delattr__(self, name: str) -> NoReturn:
        raise ImportError(object.__getattribute__(self, "_why"))

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Say that it is not available."""
        raise ImportError(object.__getattribute__(self, "_why"))

    def __repr__(self) -> str:
        return f"<module {ModuleType.__getattribute__(self, '__name__')!r} (not available)>"

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (ModuleType.__getattribute__(self, "__name__"),)


class UserModule(ModuleType):
    """A module of the user's own, which came with the request."""


class Modules:
    """All that a block may import."""

    def __init__(self, whitelist: Whitelist, replacements: Mapping[str, Any]) -> None:
        """`replacements` stand for what a name ("operator.attrgetter") is outside."""
        self._whitelist = whitelist
        self._replacements = dict(replacements)
        self._wrappers: dict[str, ProtectedModule] = {}
        self._instead: dict[int, tuple[Any, Any]] = {}
        self._denied: dict[int, tuple[Any, str, str]] = {}
        """What is denied somewhere, by its id: it, its path, and why."""
        self.users: dict[str, UserModule] = {}
        """The user's own, by name; see `UserModule`."""
        self.builtins: ModuleType | None = None
        for entry in whitelist.modules.values():
            self._deny(entry)
        for path, value in self._replacements.items():
            module, _, name = path.rpartition(".")
            original = getattr(importlib.import_module(module), name)
            self._instead[id(original)] = (original, value)

    def replace(self, original: object, value: object) -> None:
        """Give `value` wherever a module gives `original`."""
        self._instead[id(original)] = (original, value)

    def _deny(self, entry: WhitelistedModule) -> None:
        """Know what the entry denies by more than its name: other modules may give it under others."""
        for path, reason in entry.denied.items():
            above, _, name = f"{entry.name}.{path}".rpartition(".")
            # Only what is there already: a module that makes attributes when asked may import for them.
            value = vars(sys.modules[above]).get(name) if above in sys.modules else None
            if callable(value) and not isinstance(value, ModuleType):
                self._denied[id(value)] = value, f"{above}.{name}", reason

    def refusal(self, name: str) -> str:
        """The sentence for a module that is not available."""
        return (
            f"module {name!r} is not available on this server; available: "
            f"{self._whitelist.available()}"
        )

    def get(self, name: str) -> ModuleType:
        """The module `name`, or the placeholder where it is not whitelisted.

        Raises:
            ImportError: if it is whitelisted but not installed, or denied.
        """
        if name in ("builtins", "__builtins__") and self.builtins is not None:
            return self.builtins
        if name in self.users:
            return self.users[name]
        if name in self._wrappers:
            return self._wrappers[name]
        if self._whitelist.find(name) is None and not self._leads_somewhere(name):
            root = name.partition(".")[0]
            entry = self._whitelist.modules.get(root)
            reason = entry and entry.reason(name)
            if reason:
                return UnauthorizedModule(
                    name, f"module {name!r} is not available on this server: {reason}"
                )
            return UnauthorizedModule(name, self.refusal(name))
        return self._wrap(importlib.import_module(name), name)

    def _leads_somewhere(self, name: str) -> bool:
        """Whether a whitelisted module is below `name`."""
        return any(entry.startswith(name + ".") for entry in self._whitelist.modules)

    def wrap(self, module: ModuleType) -> ModuleType:
        """A module that was found somewhere, as a block may have it.

        Raises:
            AttributeError: if it is not whitelisted.
        """
        if isinstance(module, ProtectedModule | UnauthorizedModule | UserModule):
            return module
        name = module.__name__
        if self._whitelist.find(name) is None:
            raise AttributeError(
                f"module attribute {name!r} is not whitelisted; available: "
                f"{self._whitelist.available()}"
            )
        return self._wrap(module, name)

    def _wrap(self, module: ModuleType, name: str) -> ProtectedModule:
        known = self._wrappers.get(name)
        if known is not None and _BACKING[id(known)][1] is module:
            return known
        if name == "sympy" or name.startswith("sympy."):
            guard_sympy()
        elif name == "pandas" or name.startswith("pandas."):
            guard_pandas(self._whitelist)
        entry = self._whitelist.modules.get(name.partition(".")[0])
        if entry is not None:
            self._deny(entry)
        wrapper = ProtectedModule(name, module.__doc__)
        _BACKING[id(wrapper)] = (self, module, name)
        own = object.__getattribute__(wrapper, "__dict__")
        for key in list(vars(module)):
            try:
                own[key] = self._checked(module, name, key)
            except (AttributeError, ImportError):
                if key in own and key not in ("__name__", "__doc__"):
                    del own[key]
        exported = getattr(module, "__all__", None)
        if exported is not None:
            own["__all__"] = [key for key in exported if key in own]
        self._wrappers.setdefault(name, wrapper)
        return wrapper

    def stored(self, wrapper: ProtectedModule, name: str) -> Any:
        """An attribute that the class of the wrapper has too, and that is not meant."""
        own = object.__getattribute__(wrapper, "__dict__")
        return own[name] if name in own else ProtectedModule.__getattr__(wrapper, name)

    def _checked(self, module: ModuleType, name: str, key: str) -> Any:
        """An attribute that a wrapper gets when it is made: no submodule, which may be large."""
        value = vars(module)[key]
        if isinstance(value, ModuleType):
            raise AttributeError(key)
        return self._permitted(name, key, value)

    def attribute(self, module: ModuleType, path: str, name: str) -> Any:
        """An attribute of a whitelisted module.

        Raises:
            AttributeError: if the module does not have it, or a block may not.
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
        """`value`, or what a block gets instead of it.

        Raises:
            AttributeError: if it gets nothing.
        """
        if name in _PUBLIC_DUNDERS:
            return value
        if name.startswith("_"):
            raise AttributeError(f"{path}.{name} is private to its module and not available")
        entry = self._whitelist.find(path)
        if entry is None:
            if self._leads_somewhere(f"{path}.{name}") or self._whitelist.find(f"{path}.{name}"):
                return value
            raise AttributeError(f"{path}.{name} is not whitelisted")
        if entry.only is not None and name not in entry.only:
            if self._leads_somewhere(f"{path}.{name}"):
                return value
            raise AttributeError(
                f"{path}.{name} is not available on this server; of {path} there are "
                f"{', '.join(sorted(entry.only))}"
            )
        reason = entry.reason(f"{path}.{name}")
        if reason:
            raise AttributeError(f"{path}.{name} is not available on this server: {reason}")
        known = self._denied.get(id(value))
        if known is not None and known[0] is value:
            raise AttributeError(f"{path}.{name} is not available on this server: {known[2]}")
        replaced = self._instead.get(id(value))
        if replaced is not None and replaced[0] is value:
            return replaced[1]
        home = _home(value)
        if home is not None and not self._is_home(home):
            raise AttributeError(
                f"{path}.{name} belongs to the module {home!r}, which is not available on this server"
            )
        return value

    def _is_home(self, name: str) -> bool:
        if name in _HARMLESS_HOMES:
            return True
        root = name.partition(".")[0].lstrip("_")
        entry = self._whitelist.modules.get(root) or self._whitelist.modules.get("_" + root)
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
        """What `import` calls in a block."""
        if level:
            package = (globals or {}).get("__package__") or ""
            name = importlib.util.resolve_name("." * level + name, package)
        module = self.get(name)
        if isinstance(module, UnauthorizedModule):
            return module
        if not fromlist:
            root = name.partition(".")[0]
            return module if root == name else self.get(root)
        if isinstance(module, ProtectedModule):
            for wanted in fromlist:
                self._import_from(module, name, wanted)
        return module

    def _import_from(self, module: ProtectedModule, name: str, wanted: str) -> None:
        """See that `from name import wanted` finds what it may, and nothing in `sys.modules`."""
        if wanted == "*":
            return
        try:
            getattr(module, wanted)
        except AttributeError as error:
            below = f"{name}.{wanted}"
            if self._whitelist.find(below) is not None and _is_there(below):
                object.__getattribute__(module, "__dict__")[wanted] = self.get(below)
                return
            raise ImportError(str(error)) from None


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what is above it is no package
        return False


def _home(value: Any) -> str | None:
    """The module that something is from, None where that does not matter."""
    if value is None or type(value) in _PLAIN:
        return None
    # An object's is its class's; a function that Cython compiled has one of its own.
    name = getattr(value, "__module__", None)
    if name is None and not isinstance(value, _CODE):
        name = type(value).__module__
    if name == "builtins":
        # A type that anybody has, or an object of one; functions are another matter.
        return "builtins" if isinstance(value, BuiltinFunctionType | FunctionType) else None
    return name if isinstance(name, str) else None
