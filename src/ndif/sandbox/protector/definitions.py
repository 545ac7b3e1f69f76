"""Functions and classes that a payload brings along, made so that they are guarded.

nnsight sends the source of a function. Where it cannot find it, cloudpickle sends bytecode, which no guard
can stand in and which can crash the interpreter: it is not run. A function that came so is there, says so
when it is called, and is left out where Python makes it again (the methods that `@dataclass` writes).
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import weakref
from collections.abc import Callable, Mapping
from types import (
    CellType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    SimpleNamespace,
    new_class,
)
from typing import Any, NoReturn, TypeVar

from ndif.sandbox.protector.guards import Guards
from ndif.sandbox.protector.transformer import UNBOUND
from ndif.sandbox.protector.unpickling import ForbiddenError, bound

_REMADE = frozenset(
    [
        "__init__",
        "__repr__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__hash__",
        "__setattr__",
        "__delattr__",
        "__getstate__",
        "__setstate__",
        "__replace__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__annotate_func__",
    ]
)
"""What `@dataclass` writes into a class."""


class Bytecode:
    """Code that came as bytecode: its name."""

    def __init__(self, *arguments: Any) -> None:
        texts = [each for each in arguments if isinstance(each, str)]
        self.name = next((each for each in texts[1:2]), "?")


class BytecodeFunction:
    """A function whose code came as bytecode."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Say what is wrong."""
        raise TypeError(
            f"the function {self.__name__!r} was sent as bytecode, because its source could not be found, "
            "and this server runs no bytecode. Define it in a file or a notebook cell"
        )


_TYPES: dict[str, Any] = {
    "CodeType": Bytecode,
    "MethodType": bound,
    "SimpleNamespace": SimpleNamespace,
    "GenericAlias": GenericAlias,
    "MappingProxyType": MappingProxyType,
}
"""Of the module `types`, by name."""


class _Missing:
    """Stands for the class of `dataclasses.MISSING`, of which there is one object."""

    def __new__(cls) -> Any:
        return dataclasses.MISSING


class Definitions:
    """Rebuilds what cloudpickle and nnsight took apart."""

    def __init__(self, guards: Guards, classes: type) -> None:
        self._guards = guards
        self._classes = classes
        self._functions: weakref.WeakSet[FunctionType] = weakref.WeakSet()
        self._tracked: dict[str, type] = {}

    def rebuilders(self) -> dict[tuple[str, str], Any]:
        """By module and name of what they stand for."""
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
            ("types", "CodeType"): Bytecode,
            ("dataclasses", "_MISSING_TYPE"): _Missing,
            ("types", "FunctionType"): FunctionType,
        }

    # --- functions -------------------------------------------------------------------------------------

    def adopt(self, function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
        """A function made of guarded code, with globals of its own in which `names` are."""
        scope = self.scope(names)
        scope["__builtins__"] = self._guards.builtins
        made = FunctionType(
            function.__code__,
            scope,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__annotations__ = function.__annotations__
        made.__qualname__ = function.__qualname__
        made.__module__ = function.__module__
        made.__doc__ = function.__doc__
        made.__dict__.update(function.__dict__)
        self._functions.add(made)
        return made

    def scope(self, names: Any) -> dict[str, Any]:
        """The names that a payload gives to code, without those that Python itself would use."""
        if not isinstance(names, Mapping):
            raise ForbiddenError("the names of a function are a mapping")
        return {
            name: value
            for name, value in names.items()
            if isinstance(name, str) and name not in UNBOUND
        }

    def fill(self, function: Any, names: Any) -> None:
        """More names for a function that was made here.

        Raises:
            ForbiddenError: if it was not.
        """
        if isinstance(function, BytecodeFunction):
            return
        if not isinstance(function, FunctionType) or function not in self._functions:
            raise ForbiddenError("only functions that are sent can be given names")
        function.__globals__.update(self.scope(names))

    def made_here(self, function: Any) -> bool:
        """Whether a function came with a payload, as source."""
        return isinstance(function, FunctionType) and function in self._functions

    def _make_function(self, code: Any, *_: Any) -> BytecodeFunction:
        return BytecodeFunction(getattr(code, "name", "?"))

    def _fill_bytecode(self, function: Any, state: Any) -> Any:
        if not isinstance(function, BytecodeFunction):
            raise ForbiddenError("only functions that are sent can be given a state")
        return function

    def _builtin_type(self, name: str) -> Any:
        if name in _TYPES:
            return _TYPES[name]
        raise ForbiddenError(f"types.{name} cannot be sent to this server")

    # --- classes --------------------------------------------------------------------------------------

    def _make_class(
        self,
        metaclass: Any,
        name: str,
        bases: tuple[type, ...],
        options: Mapping[str, Any],
        identity: str | None,
        extra: Any = None,
    ) -> Any:
        metaclass = type if metaclass is self._classes else metaclass
        self._check_class(metaclass, bases)
        content = self._content(options)
        bases = tuple(type if base is self._classes else base for base in bases)
        made = new_class(name, bases, {"metaclass": metaclass}, lambda own: own.update(content))
        return self._known(identity, made)

    def _make_enum(
        self,
        bases: tuple[type, ...],
        name: str,
        qualname: str,
        members: Mapping[str, Any],
        module: str,
        identity: str | None,
        extra: Any = None,
    ) -> Any:
        metaclass = type(bases[-1])
        self._check_class(metaclass, bases)
        if not issubclass(metaclass, enum.EnumMeta):
            raise ForbiddenError("an enumeration is made of an enumeration")
        content = metaclass.__prepare__(name, bases)
        for member, value in self._content(members).items():
            content[member] = value
        made: Any = metaclass.__new__(metaclass, name, bases, content)
        made.__module__ = module
        made.__qualname__ = qualname
        return self._known(identity, made)

    def _check_class(self, metaclass: Any, bases: Any) -> None:
        known = metaclass in (type, abc.ABCMeta) or isinstance(metaclass, enum.EnumMeta)
        if not isinstance(metaclass, type) or not issubclass(metaclass, type):
            raise ForbiddenError("a class is made by a metaclass")
        if not (known or issubclass(metaclass, type)):
            raise ForbiddenError(f"the metaclass {metaclass.__name__} cannot be sent")
        if not isinstance(bases, tuple) or not all(isinstance(base, type) for base in bases):
            raise ForbiddenError("a class is made of classes")

    def _content(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        refused = (
            UNBOUND - {"__annotations__", "__dataclass_fields__", "__dataclass_params__"}
        ) & set(attributes)
        if refused:
            raise ForbiddenError(f"a class with {sorted(refused)[0]} cannot be sent to this server")
        names = attributes.get("__annotations__", {})
        if not all(isinstance(name, str) and name.isidentifier() for name in names):
            raise ForbiddenError("a class has fields that are no names")
        return dict(attributes)

    def _known(self, identity: Any, made: Any) -> Any:
        self._guards.own(made)
        if isinstance(identity, str):
            return self._tracked.setdefault(identity, made)
        return made

    def _fill_class(self, cls: Any, state: Any) -> Any:
        if not isinstance(cls, type) or not self._guards.owns(cls):
            raise ForbiddenError("only classes that are sent can be given attributes")
        attributes = self._content(state[0])
        registry = attributes.pop("_abc_impl", ())
        fields = attributes.get("__dataclass_fields__")
        if fields is not None:
            return self._fill_dataclass(cls, attributes)
        for name, value in attributes.items():
            setattr(cls, name, value)
        for each in registry:
            cls.register(each)  # type: ignore[attr-defined]
        return cls

    def _fill_dataclass(self, cls: Any, attributes: dict[str, Any]) -> Any:
        """Write a dataclass's methods again: they came as bytecode, having no source."""
        fields = attributes["__dataclass_fields__"]
        parameters = attributes.get("__dataclass_params__")
        for name, value in attributes.items():
            remade = name in _REMADE and isinstance(value, BytecodeFunction | type(None) | dict)
            if not remade and name not in ("__dataclass_fields__", "__dataclass_params__"):
                setattr(cls, name, value)
        for name in getattr(cls, "__annotations__", {}):
            given = fields.get(name)
            if isinstance(given, dataclasses.Field):
                made = (
                    dataclasses.field(
                        default=given.default,
                        default_factory=given.default_factory,
                        init=given.init,
                        repr=given.repr,
                        hash=given.hash,
                        compare=given.compare,
                        metadata=given.metadata,
                        kw_only=given.kw_only,
                    )
                    if given.default is dataclasses.MISSING or name not in vars(cls)
                    else given.default
                )
                setattr(cls, name, made)
        options = {
            option: getattr(parameters, option)
            for option in ("init", "repr", "eq", "order", "unsafe_hash", "frozen")
            if hasattr(parameters, option)
        }
        return dataclasses.dataclass(**options)(cls)

    def dataclass_skeleton(
        self,
        name: str,
        bases: tuple[type, ...],
        options: Mapping[str, Any],
        fields: list[tuple[str, Any, Any]],
        parameters: Mapping[str, Any],
        identity: str,
    ) -> Any:
        """A dataclass of nnsight 0.6 and 0.7, which sends its fields."""
        annotations = {field: kind for field, kind, _ in fields}
        content = {
            field: default for field, _, default in fields if default is not dataclasses.MISSING
        }
        self._check_class(type, bases)
        content = self._content({**content, **options, "__annotations__": annotations})
        made = new_class(name, tuple(bases), {}, lambda own: own.update(content))
        return self._known(identity, dataclasses.dataclass(**parameters)(made))

    def _make_typevar(
        self, name: str, bound: Any, constraints: Any, covariant: bool, contravariant: bool, _: Any
    ) -> Any:
        make: Callable[..., Any] = TypeVar
        return make(
            name, *constraints, bound=bound, covariant=covariant, contravariant=contravariant
        )
