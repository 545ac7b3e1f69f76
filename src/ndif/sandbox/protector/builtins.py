"""A block's builtins: harmless ones, and guarded forms of functions that access attributes or run code."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import operator
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NoReturn

from ndif.sandbox.protector.definitions import as_dataclass
from ndif.sandbox.protector.guards import AccessGuards
from ndif.sandbox.protector.inheritance import content
from ndif.sandbox.protector.libraries import Getter
from ndif.sandbox.protector.modules import Modules, SyntheticModule
from ndif.sandbox.protector.names import UNBOUND, words

_PLAIN = words("""
    abs aiter all anext any ascii bin bool bytearray bytes callable chr classmethod complex dict dir
    divmod enumerate filter float format frozenset hash hex id int isinstance issubclass iter len list
    map max memoryview min next object oct ord pow print property range repr reversed round set slice
    sorted staticmethod str sum super tuple zip True False None Ellipsis NotImplemented __debug__
""")

_UNAVAILABLE = words("open input breakpoint help exit quit copyright credits license")

_Compile = Callable[[str, str, str], CodeType]


class Code:
    """An opaque handle of compiled code: `compile` returns one to a block; `exec` and `eval` take one."""

    __slots__ = ("__weakref__",)


class Builtins:
    """Fills the dictionary that a user's code has as its builtins.

    Owns the code that blocks compiled. Asks `AccessGuards` about attributes and the user's classes. Leaves
    imports to `Modules`, to which it gives guarded forms of library functions.
    """

    def __init__(self, guards: AccessGuards, modules: Modules, compiler: _Compile) -> None:
        self._guards = guards
        self._compiler = compiler
        self._codes: dict[int, tuple[Code, CodeType]] = {}
        self.classes = _classes(guards)
        """The replacement of `type`."""
        table = guards.builtins
        table.update((name, getattr(builtins, name)) for name in _PLAIN if hasattr(builtins, name))
        table.update(
            (name, value)
            for name, value in vars(builtins).items()
            if isinstance(value, type) and issubclass(value, BaseException)
        )
        table.update((name, _unavailable(name)) for name in _UNAVAILABLE)
        table["__import__"] = modules.importer
        table.update(self._guarded())
        modules.builtins = SyntheticModule(
            "builtins",
            {
                name: value
                for name, value in table.items()
                if not name.startswith("_") and name not in _UNAVAILABLE
            },
        )
        self._replace_in(modules)

    def _guarded(self) -> dict[str, Any]:
        return {
            "__build_class__": self._build_class,
            "__name__": "builtins",
            "getattr": self._getattr,
            "hasattr": self._hasattr,
            "setattr": self._guards.set,
            "delattr": self._guards.delete,
            "type": self.classes,
            "compile": self._compile,
            "exec": self._exec,
            "eval": self._eval,
            "globals": lambda: sys._getframe(1).f_globals,
            "locals": lambda: sys._getframe(1).f_locals,
            "vars": self._vars,
        }

    def _replace_in(self, modules: Modules) -> None:
        """Replace functions that reach attributes or items, in every module that exports them."""
        guards = self._guards
        for original, value in (
            (operator.attrgetter, guards.texts.attrgetter),
            (operator.methodcaller, guards.texts.methodcaller),
            (operator.getitem, guards.item),
            (operator.itemgetter, self._itemgetter),
            (functools.wraps, self._wraps),
            (functools.update_wrapper, self._update_wrapper),
            (functools.cached_property, _cached_property(guards)),
            (dataclasses.dataclass, self._dataclass),
            (getattr, self._getattr),
            (setattr, guards.set),
        ):
            modules.replace(original, value)

    def _getattr(self, value: Any, name: str, *default: Any) -> Any:
        if len(default) > 1:
            raise TypeError(f"getattr expected at most 3 arguments, got {2 + len(default)}")
        try:
            return self._guards.read(value, name)
        except AttributeError:
            if default:
                return default[0]
            raise

    def _itemgetter(self, *keys: Any) -> Callable[[Any], Any]:
        """Replace `operator.itemgetter`, with a guard for every key."""
        original, item = operator.itemgetter(*keys), self._guards.item
        if len(keys) == 1:
            return Getter(original, lambda value: item(value, keys[0]))
        return Getter(original, lambda value: tuple(item(value, key) for key in keys))

    def _hasattr(self, value: Any, name: str) -> bool:
        return self._getattr(value, name, _ABSENT) is not _ABSENT

    def _vars(self, *value: Any) -> Any:
        if not value:
            return sys._getframe(1).f_locals
        return self._guards.read(value[0], "__dict__")

    def _compile(
        self, source: str | bytes, filename: str, mode: str, *_: object, **__: object
    ) -> Code:
        """Compile a block's text; ignore flags, which do not change the guards."""
        text = _text(source, "compile() takes source text on this server, not a syntax tree")
        code = Code()
        # Tracebacks read no file for a name in angle brackets.
        self._codes[id(code)] = code, self._compiler(text, f"<{str(filename).strip('<>')}>", mode)
        return code

    def _code(self, source: Any, mode: str) -> CodeType:
        if isinstance(source, Code):
            return self._codes[id(source)][1]
        text = _text(
            source, f"{mode}() takes source text, or the result of compile(), on this server"
        )
        return self._compiler(text.lstrip(" \t") if mode == "eval" else text, "<string>", mode)

    def _exec(self, source: Any, globals: Any = None, locals: Any = None) -> None:  # noqa: A002
        self._run(source, "exec", sys._getframe(1), globals, locals)

    def _eval(self, source: Any, globals: Any = None, locals: Any = None) -> Any:  # noqa: A002
        return self._run(source, "eval", sys._getframe(1), globals, locals)

    def _run(self, source: Any, mode: str, frame: Any, globals_: Any, locals_: Any) -> Any:
        code = self._code(source, mode)
        if globals_ is None:
            globals_ = frame.f_globals
            locals_ = frame.f_locals if locals_ is None else locals_
        elif not isinstance(globals_, dict):
            raise TypeError(f"{mode}() globals must be a dict")
        dict.__setitem__(globals_, "__builtins__", self._guards.builtins)
        return eval(code, globals_, globals_ if locals_ is None else locals_)  # noqa: S307 - guarded

    def _build_class(self, body: Any, name: str, *bases: Any, **options: Any) -> Any:
        cls = builtins.__build_class__(body, name, *bases, **options)
        if isinstance(cls, type):
            self._guards.own(cls)
        return cls

    def _wraps(self, wrapped: Any) -> Callable[[Any], Any]:
        """Replace `functools.wraps`; copy only the default attributes."""
        return lambda wrapper: self._update_wrapper(wrapper, wrapped)

    def _update_wrapper(self, wrapper: Any, wrapped: Any) -> Any:
        if not isinstance(wrapper, FunctionType | type | functools.partial):
            raise TypeError(
                "functools.wraps takes functions, classes and functools.partial on this server"
            )
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            with contextlib.suppress(AttributeError):
                self._guards.set(wrapper, name, self._guards.read(wrapped, name))
        if self._guards.own_function(wrapped):
            if self._guards.own_function(wrapper):
                wrapper.__annotations__ = dict(wrapped.__annotations__)
                vars(wrapper)["__wrapped__"] = wrapped
            vars(wrapper).update(vars(wrapped))
        return wrapper

    def _dataclass(self, cls: Any = None, /, **options: Any) -> Any:
        """Replace `dataclasses.dataclass`, which generates code from the names of the fields."""
        if cls is None:
            return lambda decorated: self._dataclass(decorated, **options)
        if not self._guards.is_users_own(cls):
            raise TypeError("dataclass() takes a class that your own code defines on this server")
        for base in cls.__mro__:
            for name in _field_names(base):
                if type(name) is not str or not name.isidentifier():
                    raise TypeError(f"the field name {name!r} of a dataclass is no identifier")
        result = as_dataclass(cls, options)
        self._guards.own(result)
        return result


_ABSENT = object()


def _text(source: object, why: str) -> str:
    """Return source text, decoded; else raise TypeError with `why`."""
    text = source.decode() if isinstance(source, bytes) else source
    if not isinstance(text, str):
        raise TypeError(why)
    return text


def _field_names(cls: type) -> list[Any]:
    """Return the names of a class's fields, from every attribute that `dataclass` reads them from."""
    attributes = content(cls)
    names: list[Any] = []
    for kind in ("__annotations__", "__dataclass_fields__"):
        fields = attributes.get(kind, {})
        if type(fields) is dict:
            names += fields
            # The code that `dataclass` generates uses the `name` of the field itself.
            names += [
                field.name for field in fields.values() if isinstance(field, dataclasses.Field)
            ]
        elif issubclass(type(fields), dict):
            raise TypeError(f"{kind} of a dataclass must be a plain dict on this server")
    return names


def _unavailable(name: str) -> Callable[..., NoReturn]:
    def unavailable(*_: Any, **__: Any) -> NoReturn:
        raise NameError(f"{name}() is not available on this server")

    unavailable.__name__ = unavailable.__qualname__ = name
    return unavailable


def _cached_property(guards: AccessGuards) -> type:
    """Return a block's `functools.cached_property`, which writes only into the user's own objects."""

    class CachedProperty(functools.cached_property[Any]):
        def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
            if instance is not None and not guards.is_users_own(instance):
                raise TypeError("cached_property belongs to a class that your own code defines")
            return super().__get__(instance, owner)

    CachedProperty.__name__ = CachedProperty.__qualname__ = "cached_property"
    CachedProperty.__module__ = "functools"
    return CachedProperty


def _classes(guards: AccessGuards) -> type:
    """Return a block's `type`, which returns an object's class or makes a class without denied names."""

    class Meta(type):
        def __call__(cls, *arguments: Any, **options: Any) -> Any:
            if cls is not stand_in:  # a metaclass of the user's
                return super().__call__(*arguments, **options)
            if len(arguments) == 1 and not options:
                kind = type(arguments[0])
                return stand_in if kind is type or kind is Meta else kind
            name, bases, namespace = arguments
            # Copied first, because a subclass of dict may list other names than it holds.
            attributes = dict(namespace)
            forbidden = UNBOUND.intersection(attributes)
            if forbidden:
                raise TypeError(f"the name {min(forbidden)!r} cannot be bound on this server")
            # Python would take this module, the caller of `type`.
            attributes.setdefault(
                "__module__", sys._getframe(1).f_globals.get("__name__", "__main__")
            )
            new_class = type(name, bases, attributes, **options)
            guards.own(new_class)
            return new_class

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, type) if cls is stand_in else super().__instancecheck__(value)

        def __subclasscheck__(cls, value: Any) -> bool:
            return issubclass(value, type) if cls is stand_in else super().__subclasscheck__(value)

        def __repr__(cls) -> str:
            return "<class 'type'>" if cls is stand_in else super().__repr__()

        def __eq__(cls, other: Any) -> bool:
            return cls is other or (cls is stand_in and other is type)

        def __hash__(cls) -> int:
            return hash(type) if cls is stand_in else super().__hash__()

    stand_in: type = Meta("type", (type,), {"__module__": "builtins"})
    return stand_in
