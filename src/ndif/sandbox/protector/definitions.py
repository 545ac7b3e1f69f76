"""Functions and classes that travel in a payload, rebuilt with guards.

nnsight sends the source of a function. If it finds none, cloudpickle sends bytecode, which cannot be
guarded and can crash the interpreter, so the server never runs it. A function sent as bytecode is replaced
by a `RefusedFunction`, which raises an error when called. The generated methods of dataclasses and named
tuples are generated again.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import weakref
from collections.abc import Callable, Mapping
from types import (
    CellType,
    CodeType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    SimpleNamespace,
    new_class,
    resolve_bases,
)
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

from ndif.sandbox.generics import with_parameters
from ndif.sandbox.protector import inheritance
from ndif.sandbox.protector.guards import AccessGuards
from ndif.sandbox.protector.names import UNBOUND, Variables, words
from ndif.sandbox.protector.placeholders import Placeholder, check, module_of, named
from ndif.sandbox.protector.unpickling import bound
from ndif.sandbox.protector.whitelist import ForbiddenError

_GENERATED = words("""
    __init__ __repr__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __setattr__ __delattr__
    __getstate__ __setstate__ __replace__ __dataclass_fields__ __dataclass_params__ __annotate_func__
""")
"""Attributes that `@dataclass` generates."""

_OF_DATACLASSES = words("__annotations__ __dataclass_fields__ __dataclass_params__")
"""Attributes in `UNBOUND` from which a dataclass is rebuilt."""

_FIELD_OPTIONS = words("default default_factory init repr hash compare metadata kw_only")

_CLASS_OPTIONS = words("init repr eq order unsafe_hash frozen")

_OF_NAMED_TUPLES = words("__new__ _make _replace __replace__ _asdict __repr__ __getnewargs__")
"""Methods that `collections.namedtuple` generates."""

_METHOD_ADDERS = ("enum", "typing", "typing_extensions")
"""Modules whose classes add methods to each derived class."""

_COPIED = ("__kwdefaults__", "__annotations__", "__qualname__", "__module__", "__doc__")
"""Attributes of a function that its constructor does not take."""


class RefusedCode:
    """A replacement of code that was sent as bytecode, which keeps only the name."""

    def __init__(self, *arguments: Any) -> None:
        texts = [argument for argument in arguments if isinstance(argument, str)]
        self.name = texts[1] if len(texts) > 1 else "?"


class RefusedFunction:
    """A function that was sent as bytecode; calling it raises TypeError."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError: this server runs no bytecode."""
        raise TypeError(
            f"the function {self.__name__!r} was sent as bytecode, because its source could not be found, "
            "and this server runs no bytecode. Define the function in a file or a notebook cell"
        )


_TYPES: dict[str, Any] = {
    "CodeType": RefusedCode,
    "MethodType": bound,
    "SimpleNamespace": SimpleNamespace,
    "GenericAlias": GenericAlias,
    "MappingProxyType": MappingProxyType,
}
"""Replacements of the types of module `types`, by name."""


class _Missing:
    """Replaces the class of `dataclasses.MISSING`, which has one instance."""

    def __new__(cls) -> Any:
        return dataclasses.MISSING


class Definitions:
    """Rebuilds functions and classes that cloudpickle and nnsight serialized.

    Owns the rebuilt functions, and the rebuilt classes by cloudpickle's identity. Records the user's
    classes in `AccessGuards`. Leaves compilation to the Protector.
    """

    def __init__(self, guards: AccessGuards, classes: type) -> None:
        self._guards = guards
        self._classes = classes
        self._functions: weakref.WeakSet[FunctionType] = weakref.WeakSet()
        self._tracked: dict[str, type] = {}

    def rebuilders(self) -> dict[tuple[str, str], Any]:
        """Return replacements of cloudpickle's functions, by module and name."""
        cloud = "cloudpickle.cloudpickle"
        return {
            (cloud, "_builtin_type"): self._builtin_type,
            (cloud, "_make_function"): self._make_function,
            (cloud, "_make_empty_cell"): lambda: CellType(),
            (cloud, "_make_cell"): lambda *value: CellType(*value),
            (cloud, "_make_skeleton_class"): self._make_class,
            (cloud, "_make_skeleton_enum"): self._make_enum,
            (cloud, "_class_setstate"): self._fill_class,
            (cloud, "_function_setstate"): self._fill_bytecode,
            (cloud, "_make_typevar"): self._make_typevar,
            ("types", "CodeType"): RefusedCode,
            ("dataclasses", "_MISSING_TYPE"): _Missing,
            ("types", "FunctionType"): FunctionType,
        }

    def adopt(self, function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
        """Return a copy of a guarded function that has its own globals, with `names` in them."""
        scope = {**self.scope(names), "__builtins__": self._guards.builtins}
        adopted = copied(function, function.__code__, scope)
        self._functions.add(adopted)
        return adopted

    def scope(self, names: Any) -> Variables:
        """Return the globals that a payload gives to code, without names that Python itself would use.

        Placeholders among them record their variables.
        """
        if not isinstance(names, Mapping):
            raise ForbiddenError("the globals of a function must be a mapping")
        return {
            name: named(value, name)
            for name, value in names.items()
            if isinstance(name, str) and name not in UNBOUND
        }

    def fill(self, function: Any, names: Any) -> None:
        """Add globals to a function from `adopt`; skip refused ones, raise ForbiddenError for others."""
        if isinstance(function, RefusedFunction | Placeholder):
            return
        if not self.runs(function):
            raise ForbiddenError("a request can add globals only to functions that it defines")
        function.__globals__.update(self.scope(names))

    def runs(self, function: Any) -> bool:
        """Return True if a function was sent as source."""
        return isinstance(function, FunctionType) and function in self._functions

    def is_from_request(self, value: type | FunctionType) -> bool:
        """Return True if a payload brought this class or function; False if the block defined it."""
        if isinstance(value, FunctionType):
            return value in self._functions
        return any(cls is value for cls in self._tracked.values())

    def _make_function(self, code: Any, *_: Any) -> RefusedFunction:
        return RefusedFunction(getattr(code, "name", "?"))

    def _fill_bytecode(self, function: Any, state: Any) -> Any:
        check([function])
        if not isinstance(function, RefusedFunction):
            raise ForbiddenError("a request can set the state only of functions that it defines")
        return function

    def _builtin_type(self, name: str) -> Any:
        if name in _TYPES:
            return _TYPES[name]
        raise ForbiddenError(f"types.{name} cannot be sent to this server")

    def _make_class(
        self, metaclass: Any, name: str, bases: Any, options: Any, identity: Any, *_: Any
    ) -> Any:
        metaclass = type if metaclass is self._classes else metaclass
        # Kept as written (`Generic[T]`, `TypedDict`), because a generic class needs that form. `NamedTuple`
        # becomes tuple, because a named tuple's methods come with its state.
        bases = tuple(self._base(base) for base in bases)
        self._check_class(metaclass, resolve_bases(bases))
        content = self._content(options)
        cls = new_class(name, bases, {"metaclass": metaclass}, lambda own: own.update(content))
        return self._track(identity, cls)

    def _base(self, base: Any) -> Any:
        if base is self._classes:
            return type
        return tuple if base is NamedTuple else base

    def _make_enum(
        self, bases: Any, name: str, path: str, members: Any, module: str, identity: Any, *_: Any
    ) -> Any:
        check(bases)
        metaclass = type(bases[-1])
        self._check_class(metaclass, bases)
        if not issubclass(metaclass, enum.EnumMeta):
            raise ForbiddenError("an enumeration must derive from enum.Enum")
        content = metaclass.__prepare__(name, bases)
        for member, value in self._content(members).items():
            content[member] = value
        cls: Any = metaclass.__new__(metaclass, name, bases, content)
        cls.__module__ = module
        cls.__qualname__ = path
        return self._track(identity, cls)

    def _check_class(self, metaclass: Any, bases: Any) -> None:
        check([metaclass, *(bases if isinstance(bases, tuple) else ())])
        if not isinstance(metaclass, type) or not issubclass(metaclass, type):
            raise ForbiddenError("the metaclass of a class must be a subclass of type")
        if not isinstance(bases, tuple) or not all(isinstance(base, type) for base in bases):
            raise ForbiddenError("the bases of a class must be classes")

    def _content(self, attributes: Mapping[str, Any]) -> Variables:
        refused = (UNBOUND - _OF_DATACLASSES) & set(attributes)
        if refused:
            raise ForbiddenError(
                f"a class that defines {min(refused)} cannot be sent to this server"
            )
        names = attributes.get("__annotations__", {})
        if not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise ForbiddenError("the annotations of a class must be identifiers")
        return dict(attributes)

    def _track(self, identity: Any, cls: Any) -> Any:
        self._guards.own(cls)
        if isinstance(identity, str):
            return self._tracked.setdefault(identity, cls)
        return cls

    def _fill_class(self, cls: Any, state: Any) -> Any:
        check([cls])
        if not isinstance(cls, type) or not self._guards.is_users_own(cls):
            raise ForbiddenError("a request can set attributes only of classes that it defines")
        sent = {
            name: value for name, value in state[0].items() if not _comes_with_base(name, value)
        }
        attributes = self._content(sent)
        registry = attributes.pop("_abc_impl", ())
        if attributes.get("__dataclass_fields__") is not None:
            return self._fill_dataclass(cls, attributes)
        new = attributes.get("__new__")
        new = new.__func__ if type(new) is staticmethod else new
        if tuple in inheritance.bases(cls) and type(new) is RefusedFunction:
            attributes.update(_named_tuple(cls.__name__, attributes))
        for name, value in attributes.items():
            setattr(cls, name, value)
        for subclass in registry:
            cls.register(subclass)  # type: ignore[attr-defined]
        return cls

    def _fill_dataclass(self, cls: Any, attributes: Variables) -> Any:
        """Regenerate a dataclass's methods, which have no source and were sent as bytecode."""
        fields = attributes["__dataclass_fields__"]
        parameters = attributes.get("__dataclass_params__")
        for name, value in attributes.items():
            generated = isinstance(value, RefusedFunction | type(None) | dict)
            described = name in ("__dataclass_fields__", "__dataclass_params__")
            if not described and not (generated and name in _GENERATED):
                setattr(cls, name, value)
        for name in getattr(cls, "__annotations__", {}):
            field = fields.get(name)
            if getattr(field, "_field_type", None) is dataclasses._FIELD_CLASSVAR:  # type: ignore[attr-defined]
                cls.__annotations__[name] = ClassVar  # the annotation may be text
            elif isinstance(field, dataclasses.Field):
                plain = field.default is not dataclasses.MISSING and name in vars(cls)
                new_field = dataclasses.field(**_options(field, _FIELD_OPTIONS))
                setattr(cls, name, field.default if plain else new_field)
        return as_dataclass(cls, _options(parameters, _CLASS_OPTIONS))

    def dataclass_skeleton(
        self, name: str, bases: Any, options: Any, fields: Any, parameters: Any, identity: str
    ) -> Any:
        """Rebuild a dataclass of nnsight 0.6 and 0.7, which send its fields."""
        annotations = {field: kind for field, kind, _ in fields}
        content = {
            field: default for field, _, default in fields if default is not dataclasses.MISSING
        }
        self._check_class(type, bases)
        content = self._content({**content, **options, "__annotations__": annotations})
        cls = new_class(name, with_parameters(bases), {}, lambda own: own.update(content))
        return self._track(identity, as_dataclass(cls, parameters))

    def _make_typevar(
        self, name: str, bound: Any, constraints: Any, covariant: bool, contravariant: bool, _: Any
    ) -> Any:
        make: Callable[..., Any] = TypeVar
        return make(
            name, *constraints, bound=bound, covariant=covariant, contravariant=contravariant
        )


def copied(function: FunctionType, code: CodeType, scope: Variables | None = None) -> FunctionType:
    """Return a copy of a function with other code, and with `scope` as its globals unless None."""
    result = FunctionType(
        code,
        function.__globals__ if scope is None else scope,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    for name in _COPIED:
        setattr(result, name, getattr(function, name))
    result.__dict__.update(function.__dict__)
    return result


def _comes_with_base(name: str, value: Any) -> bool:
    """Return True for an attribute that a base of `enum` or `typing` has already given to the class.

    A client sends such an attribute by a private name or as source, whose guarded form would not work.
    """
    function = value.__func__ if type(value) in (classmethod, staticmethod) else value
    if type(function) is Placeholder:
        return module_of(function) in _METHOD_ADDERS
    return name == "__subclasshook__" and getattr(function, "__name__", None) == "_proto_hook"


def as_dataclass(cls: Any, options: Mapping[str, Any]) -> Any:
    """Return a user's class as a dataclass.

    While the methods are generated, the class has another module. Its own module, in which text annotations
    would be looked up, is on the user's machine.
    """
    for name in inheritance.content(cls).get("__annotations__", {}):
        # The generated methods read the fields of any object that is passed to them, without guards.
        if str(name).startswith("__"):
            raise TypeError(f"a dataclass cannot have a field {name!r} on this server")
    module, cls.__module__ = cls.__module__, "builtins"
    result: Any = dataclasses.dataclass(**options)(cls)
    cls.__module__ = result.__module__ = module
    return result


def _named_tuple(name: str, attributes: Mapping[str, Any]) -> Variables:
    """Return the methods of a named tuple, generated again because `__new__` has no source."""
    make: Callable[..., Any] = collections.namedtuple
    fields, defaults = attributes.get("_fields", ()), attributes.get("_field_defaults", {})
    try:
        named_tuple = make(name, fields, defaults=defaults.values())
    except (TypeError, ValueError, AttributeError) as error:
        raise ForbiddenError(
            f"the named tuple {name} cannot be sent to this server: {error}"
        ) from None
    return {
        method: vars(named_tuple)[method]
        for method in _OF_NAMED_TUPLES
        if method in vars(named_tuple)
    }


def _options(value: Any, names: frozenset[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
