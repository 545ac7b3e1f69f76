"""Guards: the functions that a user's code calls instead of accessing attributes and items.

No guard is bound to a name that a block can see (see `transformer`), and code that a guard calls runs
unguarded. The common case, a public attribute of an object without denied ones, costs one call, one table
lookup and the access itself.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import sys
import typing
from collections.abc import Callable, Container, Mapping
from types import BuiltinFunctionType, FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any

import torch
from RestrictedPython.transformer import INSPECT_ATTRIBUTES

from ndif.sandbox.protector import inheritance, names, paths
from ndif.sandbox.protector.inheritance import PerClassCache, bases, home
from ndif.sandbox.protector.libraries import (
    GuardedLookups,
    guard_copying,
    guard_pandas,
    guard_redirection,
    guard_templates,
    guard_transformers,
    guard_wrapping,
)
from ndif.sandbox.protector.modules import Modules, ProtectedModule, SyntheticModule, UserModule
from ndif.sandbox.protector.objects import ProtectedObjects, is_of_model_libraries
from ndif.sandbox.protector.patterns import matched
from ndif.sandbox.protector.placeholders import Placeholder
from ndif.sandbox.protector.transformer import private
from ndif.sandbox.protector.whitelist import Whitelist

_GUARDED_MODULES = (ProtectedModule, SyntheticModule, Placeholder, UserModule)
"""Classes of the modules that a block gets; classes that a block derives from them do not count."""

_ALIASES = (GenericAlias, typing._BaseGenericAlias)  # type: ignore[attr-defined]
_FORWARDING = (MethodType, *_ALIASES)
"""Classes whose instances forward attribute access to another object: `list[int]`, `x.method`."""

_CHECKED_ITEMS = frozenset((ModuleType, BuiltinFunctionType, FunctionType))
"""Classes of values that are checked when a block takes them out of a container."""

_DATA = frozenset(
    base for cls in (io.StringIO, io.BytesIO, *paths.CLASSES.values()) for base in bases(cls)
)
"""Classes of foreign modules whose objects are data and touch no file, with their base classes."""

_NO_NAMES: frozenset[str] = frozenset()
_WRAPPED = ("__getattribute__", "_module", "_envoy")
"""Attributes by which a wrapper of nnsight reaches the wrapped object."""

_ADDED_BY_NNSIGHT = names.words("save")
"""Attributes that nnsight gives to every object."""


class _AllNames:
    def __contains__(self, name: object) -> bool:
        return True


_ALL_NAMES = _AllNames()


class AccessGuards:
    """The guards of attributes and items, and the rules that they share.

    Owns the set of the user's classes, and caches the denied attributes of each class. Asks `Whitelist`
    for denied attributes, `ProtectedObjects` for the model's objects, and `Modules` for module wrappers.
    """

    def __init__(self, whitelist: Whitelist, modules: Modules, protected: ProtectedObjects) -> None:
        self._whitelist = whitelist
        self._modules = modules
        self._protected = protected
        self._owned: dict[int, type] = {}
        """The user's classes, by id, because a metaclass may define `__eq__` and `__hash__`."""
        self._denied = PerClassCache(whitelist.of_class)
        """Denied attributes of a class's instances, with the reasons."""
        self._restricted: PerClassCache[Container[str]] = PerClassCache(self._restricted_names)
        """Attributes of a class's instances that need more than the fast path."""
        self._is_of_nnsight = PerClassCache(_is_of_nnsight)
        self._is_foreign = PerClassCache(self._has_foreign_home)
        self._is_of_library = PerClassCache(_is_of_library)
        self.builtins: dict[str, Any] = {}
        self.attribute = self._fast()
        self.texts = GuardedLookups(self.read, self.item)
        guard_copying(self.is_users_own)
        guard_wrapping()
        guard_redirection()
        guard_templates(self.check)
        guard_transformers()

    def table(self) -> dict[str, Callable[..., Any]]:
        """Return the guards by the names that the transformer uses."""
        return {
            "attribute": self.attribute,
            "private": self.private,
            "written": self.written,
            "item": self._item(),
            "matched": functools.partial(matched, self.read),
            "builtins": lambda: self._modules.builtins,
        }

    def _fast(self) -> Callable[[Any, str], Any]:
        restricted, slow, wrap = self._restricted, self._slow, self._modules.wrap

        def attribute(value: Any, name: str) -> Any:
            if name in restricted[type(value)]:
                return slow(value, name)
            result = getattr(value, name)
            if isinstance(result, ModuleType):
                return wrap(result)
            return result

        return attribute

    def read(self, value: Any, name: str) -> Any:
        """Return an attribute whose name is known only at run time."""
        _check_text(name)
        return self.private(value, name) if private(name) else self.attribute(value, name)

    def private(self, value: Any, name: str) -> Any:
        """Return an attribute with an underscore, or one of a frame, generator or traceback."""
        if name in names.CHECKED:
            return self._checked(value, name)
        if name not in names.ALLOWED and name not in names.PUBLIC:
            dunder = name.startswith("__") and name.endswith("__")
            allowed = name in names.OWN if dunder else name not in INSPECT_ATTRIBUTES
            if type(value) is Placeholder:
                value()  # raises the error of the missing module for every attribute
            if not (allowed and self.is_users_own(value) and self._may_read_private(value, name)):
                raise AttributeError(self._refusal(value, name))
        return self.attribute(value, name)

    def _refusal(self, value: Any, name: str) -> str:
        if name == "__class__":
            return (
                "the attribute '__class__' is not available on this server; use type(...) instead"
            )
        if name in names.BLOCKED | names.INHERITED | INSPECT_ATTRIBUTES:
            return f"the attribute {name!r} is not available on this server"
        return (
            f"the attribute {name!r} of {_label(value)} is private, and not available on this server; "
            "private attributes can be read only from instances of classes that your own code defines"
        )

    def _restricted_names(self, cls: type) -> Container[str]:
        if _is_guarded_module(cls):
            # nnsight gives every object a `save`, which is no attribute of the module.
            return _ADDED_BY_NNSIGHT if issubclass(cls, ProtectedModule) else _NO_NAMES
        if (
            issubclass(cls, (ModuleType, type, super, torch.nn.Module, *_FORWARDING))
            or self._is_of_nnsight[cls]
            or is_of_model_libraries(cls)
            or self._is_foreign[cls]
        ):
            return _ALL_NAMES
        if any(home(base).partition(".")[0] == "pandas" for base in bases(cls)):
            guard_pandas(self._whitelist)
        denied = self._denied[cls]
        if issubclass(cls, str):
            return frozenset(denied) | names.FORMAT_METHODS
        return frozenset(denied)

    def _slow(self, value: Any, name: str) -> Any:
        """Return a restricted attribute, after all checks."""
        kind = type(value)
        if issubclass(kind, str) and name in names.FORMAT_METHODS:
            return self.texts.guarded(self._plain(value, name))
        if issubclass(kind, _FORWARDING) and not _defines(value, name):
            return self.attribute(self._forward_target(value, name), name)
        # A class that a block derives from a guarded one also has attributes of its other bases.
        if issubclass(kind, ModuleType) and (
            _is_guarded_module(kind) or not issubclass(kind, _GUARDED_MODULES)
        ):
            module = self._modules.wrap(value)
            if isinstance(module, ProtectedModule) and name in _ADDED_BY_NNSIGHT:
                return self._modules.stored(module, name)
            return getattr(module, name)
        self._check(value, name)
        result = self._plain(value, name)
        if issubclass(kind, type | super):
            result = self.texts.guarded(result)
            value = inheritance.bound(value) if issubclass(kind, super) else value
        if name == "__getitem__" and self._is_of_nnsight[_class_of(value)]:
            return self._indexing(result, None if issubclass(type(value), type) else value)
        if issubclass(kind, type | super):
            if issubclass(type(value), type):
                listing = issubclass(value, torch.nn.Module)
                return self._protected.protect_method(name, result) if listing else result
        elif self._is_submodule(value, name):
            return result
        envoy = self._is_envoy(value)
        if envoy and name == "get":
            return functools.partial(self.follow, value)
        return (
            self._protected.protect_attribute(name, result)
            if envoy or value in self._protected
            else result
        )

    def _forward_target(self, value: Any, name: str) -> Any:
        """Return the object to which a method or an alias forwards attribute access."""
        if type(value) is MethodType:
            return value.__func__
        if not self._is_of_library[type(value)]:
            raise AttributeError(self._refusal(value, name))
        return value.__origin__

    def _indexing(self, method: Callable[..., Any], envoy: Any) -> Callable[..., Any]:
        """Return the `__getitem__` of an Envoy (None: of its class), with a guard for string keys."""

        def item(*arguments: Any) -> Any:
            receiver, key = arguments[0] if envoy is None else envoy, arguments[-1]
            plain = type(key) in (int, slice) or not self._is_envoy(receiver)
            return method(*arguments) if plain else self.item(receiver, key)

        return item

    def _plain(self, value: Any, name: str) -> Any:
        result = getattr(value, name)
        return self._modules.wrap(result) if isinstance(result, ModuleType) else result

    def _is_envoy(self, value: Any) -> bool:
        return self._is_of_nnsight[type(value)] and "_module" in _own(value)

    def _is_submodule(self, value: Any, name: str) -> bool:
        """Return True if `name` is the model author's name for a submodule, such as T5's `decoder`."""
        if not self._is_envoy(value):
            return False
        attributes = _own(value)
        return name in attributes and name in getattr(attributes["_module"], "_modules", {})

    def _check(self, value: Any, name: str) -> None:
        """Raise AttributeError if an object's attribute is denied, however it is accessed."""
        kind = type(value)
        if issubclass(kind, super):
            self._check_super(value, name)
        elif issubclass(kind, type):
            self._check_class(value, name, inheritance.searched(value))
        elif not self._is_submodule(value, name):
            self._check_object(value, name)

    def _check_object(self, value: Any, name: str) -> None:
        kind = type(value)
        self._check_home(kind, name)
        _check_denied(self._denied[kind], kind, name)
        if self._is_of_nnsight[kind]:
            _check_denied(self._whitelist.nnsight, kind, name)
        if self._is_envoy(value) or value in self._protected:
            _check_denied(self._whitelist.model, kind, name)
        if self._is_of_nnsight[kind]:
            self._check_wrapped(value, name)

    def _check_wrapped(self, value: Any, name: str) -> None:
        """Check the attribute of the object to which a wrapper of nnsight forwards access.

        A payload may choose any wrapped object, and a user's class may compute one.
        """
        for attribute in () if self._is_of_library[type(value)] else _WRAPPED:
            origin = inheritance.definer(bases(type(value)), attribute)
            if origin is not None and self._is_user_class(origin):
                raise AttributeError(self._refusal(value, attribute))
        for attribute in _WRAPPED[1:]:
            wrapped = _own(value).get(attribute)
            if isinstance(wrapped, str):
                raise AttributeError(self._refusal(value, attribute))
            if wrapped is not None:
                self._check(wrapped, name)

    def _check_home(self, cls: type, name: str) -> None:
        """Raise AttributeError if a block may not use objects of the module that defines a class.

        A block may still obtain such an object, for example from a library that reads attributes by name.
        """
        if self._is_foreign[cls] and name not in names.DESCRIBING:
            raise AttributeError(
                f"{inheritance.full_name(cls)}.{name} is not available on this server: a block uses no "
                f"object of the module {home(cls)!r}"
            )

    def _has_foreign_home(self, cls: type) -> bool:
        return not issubclass(cls, BaseException) and any(
            home(base).partition(".")[0] in names.FOREIGN
            and not any(base is data for data in _DATA)
            and not self._is_user_class(base)
            for base in bases(cls)
        )

    def check(self, value: Any, name: str) -> None:
        """Raise AttributeError if a library may not read this public attribute for the user."""
        _check_text(name)
        self._check(value, name)

    def _check_super(self, value: Any, name: str) -> None:
        """Check an attribute of a `super()` like an attribute of its bound object."""
        receiver, cls = inheritance.bound(value), inheritance.bound_as(value)
        if cls is None:
            return
        if issubclass(type(receiver), type):
            self._check_class(receiver, name, inheritance.remaining(value))
        else:
            self._check_object(receiver, name)
        if cls is not receiver and cls is not type(receiver):
            self._check_class(cls, name, inheritance.remaining(value))

    def _check_class(self, cls: type, name: str, classes: tuple[type, ...]) -> None:
        """Check an attribute of a class.

        An attribute that a user's class defines is the user's. An attribute inherited from a server's class
        also accepts the server's objects, so it is checked like an attribute of that class. Python searches
        `classes` in order.
        """
        if name in names.INHERITED:
            raise AttributeError(self._refusal(cls, name))
        self._check_home(cls, name)
        _check_denied(self._denied[cls], cls, name)
        origin = inheritance.definer(classes, name)
        if self._is_user_class(cls if origin is None else origin):
            return
        if self._is_of_nnsight[cls]:
            _check_denied(self._whitelist.nnsight, cls, name)
        order = bases(cls)
        module = issubclass(cls, torch.nn.Module) or inheritance.definer(order, "from_pretrained")
        if module or (self._is_of_nnsight[cls] and inheritance.definer(order, "_add_envoy")):
            _check_denied(self._whitelist.model, cls, name)

    def follow(self, value: Any, path: str) -> Any:
        """Return the object at a dotted path ("transformer.h.1"); replaces `Envoy.get` and the like."""
        for part in filter(None, str(path).split(".")):
            value = getattr(value, part) if part.isdigit() else self.read(value, part)
        return value

    def _item(self) -> Callable[[Any, Any], Any]:
        restricted, item, permit = self._restricted, self.item, self._permit

        def guarded(value: Any, key: Any) -> Any:
            if restricted[type(value)] is _ALL_NAMES:
                return item(value, key)
            result = value[key]
            return permit(result) if type(result) in _CHECKED_ITEMS else result

        return guarded

    def item(self, value: Any, key: Any) -> Any:
        """Return an item of an object whose keys may be names of attributes."""
        if self._is_envoy(value):
            if isinstance(key, str):
                key = str(key)
                return value[key] if key.isdigit() else self.read(value, key)
            if not isinstance(key, slice):
                key = key.__index__()
        result = value[key]
        return self._permit(result) if type(result) in _CHECKED_ITEMS else result

    def _permit(self, value: Any) -> Any:
        """Return a module or function from a container after a check: the server's containers may hold any.

        Raises:
            AttributeError: If a block may not use the module or function.
        """
        if isinstance(value, ModuleType):
            return self._modules.wrap(value)
        if self.own_function(value):
            return value
        origin = str(getattr(value, "__module__", None)).partition(".")[0]
        is_builtin = origin == "builtins" and type(value) is BuiltinFunctionType
        if origin in names.FOREIGN or (is_builtin and value not in self.builtins.values()):
            raise AttributeError(f"{value.__name__}() is not available on this server")
        return value

    def own(self, cls: type) -> None:
        """Record that `cls` is a class of the user."""
        self._owned[id(cls)] = cls

    def is_users_own(self, value: Any) -> bool:
        """Return True if `value` is a user's class, an instance of one, or a user's module."""
        kind = type(value)
        if issubclass(kind, UserModule):
            return True
        if issubclass(kind, super):
            return self.is_users_own(inheritance.bound(value))
        cls = _class_of(value)
        return self._is_user_class(cls) or any(id(base) in self._owned for base in bases(cls))

    def _is_user_class(self, cls: type) -> bool:
        """Return True if the user defined this very class, not only a base of it."""
        if any(id(base) in self._owned for base in (cls, *bases(type(cls)))):
            return True
        # Until its `class` statement ends, a class is not recorded, but its functions are the user's.
        return any(self.own_function(attribute) for attribute in inheritance.content(cls).values())

    def _may_read_private(self, value: Any, name: str) -> bool:
        """Return True if a private attribute of a user's object may be read, judged by its defining class.

        An instance may inherit the attribute from a server's class, but not from a class of transformers,
        tokenizers or peft. A class may not inherit the attribute: methods read from a class are functions,
        which also accept the server's objects.
        """
        if issubclass(type(value), super):
            classes = inheritance.remaining(value)
            value = inheritance.bound(value)
        else:
            classes = inheritance.searched(_class_of(value))
        origin = inheritance.definer(classes, name)
        if (
            origin in (None, object, type)
            or name in names.OWN_OF_CLASS
            or self._is_user_class(origin)
        ):
            return True
        return not issubclass(type(value), type) and not is_of_model_libraries(origin)

    def own_function(self, value: Any) -> bool:
        """Return True if `value` is a function of the user."""
        return isinstance(value, FunctionType) and getattr(value, "__builtins__") is self.builtins  # noqa: B009

    def written(self, value: Any, name: str) -> Any:
        """Return `value`, or raise AttributeError if its attribute `name` may not be set or deleted."""
        self.check_write(value, name)
        return value

    def check_write(self, value: Any, name: str) -> None:
        """Raise AttributeError if an attribute may not be set or deleted."""
        if id(type(value)) in self._owned and not private(name):
            return
        _check_text(name)
        if issubclass(type(value), _ALIASES):
            value = self._forward_target(value, name)
        refusal = self._write_refusal(value, name)
        if refusal is not None:
            raise AttributeError(refusal)

    def _write_refusal(self, value: Any, name: str) -> str | None:
        kind = type(value)
        if issubclass(kind, dataclasses.Field):
            remedy = "pass it to dataclasses.field(...)"
            return f"cannot set {name!r} of a dataclass's field on this server; {remedy}"
        if name in names.UNBOUND or name in names.BLOCKED or name in INSPECT_ATTRIBUTES:
            return f"the attribute {name!r} cannot be set on this server"
        if isinstance(value, UserModule):
            return None
        if isinstance(value, ModuleType):
            return f"cannot modify the module {value.__name__!r}: it is protected on this server"
        is_users_own = self.is_users_own(value)
        if name.startswith("__") and name.endswith("__"):
            allowed = is_users_own or (name in names.WRITABLE and self.own_function(value))
            if allowed or (isinstance(value, BaseException) and name in names.CONTEXTUAL):
                return None
            return f"the attribute {name!r} of {_label(value)} cannot be set on this server"
        if is_users_own or self.own_function(value):
            return None
        if name.startswith("_"):
            return (
                f"cannot set the private attribute {name!r} of {_label(value)}; private attributes can be "
                "set only on instances of classes that your own code defines"
            )
        if issubclass(kind, type) or isinstance(value, FunctionType | MethodType):
            return f"cannot set {name!r} of {value!r}: your own code does not define it"
        protected = f"cannot set {name!r} of {_label(value)}: it is protected"
        if self._is_of_nnsight[kind]:
            _check_denied(self._whitelist.nnsight, kind, name)
            # nnsight's own setters, such as `.output = …`, may be used.
            if not hasattr(type(getattr(kind, name, None)), "__set__"):
                return f"{protected}; you can set the output, input and inputs of a module, and a gradient"
        elif value in self._protected:
            remedy = "set the output of a module instead"
            if hasattr(kind, "convert_tokens_to_ids"):
                remedy = "set it on your side, and trace your tokenizer's output"
            return f"{protected}, because it belongs to the model; {remedy}"
        return None

    def set(self, value: Any, name: str, new: Any) -> None:
        """Set an attribute; replaces the builtin `setattr`."""
        self.check_write(value, name)
        setattr(value, name, new)

    def delete(self, value: Any, name: str) -> None:
        """Delete an attribute; replaces the builtin `delattr`."""
        self.check_write(value, name)
        delattr(value, name)

    def _checked(self, value: Any, name: str) -> Callable[..., Any]:
        """Return a method in `CHECKED`, such as `__setattr__`, wrapped to check its name argument."""
        method = getattr(value, name)
        unbound = isinstance(value, type)
        target = inheritance.bound(value) if issubclass(type(value), super) else value

        def checked(*arguments: Any) -> Any:
            receiver, rest = (arguments[0], arguments[1:]) if unbound else (target, arguments)
            if name in ("__setattr__", "__delattr__"):
                self.check_write(receiver, rest[0])
            else:
                self._check_read(receiver, rest[0])
            return method(*arguments)

        checked.__name__ = name
        return checked

    def _check_read(self, value: Any, name: Any) -> None:
        _check_text(name)
        if self.is_users_own(value):
            refused = name in (names.BLOCKED | INSPECT_ATTRIBUTES) - names.OWN
            is_readable = not private(name) or name in names.ALLOWED or name in names.PUBLIC
            refused = refused or not (is_readable or self._may_read_private(value, name))
        else:
            refused = private(name) or self._restricted[type(value)] is _ALL_NAMES
        if refused or (name in names.FORMAT_METHODS and issubclass(_class_of(value), str)):
            raise AttributeError(self._refusal(value, name))
        self._check(value, name)


def _is_guarded_module(cls: type) -> bool:
    return any(cls is guarded for guarded in _GUARDED_MODULES)


def _defines(value: Any, name: str) -> bool:
    """Return True if an object's class (other than `object`) or its own dictionary has an attribute."""
    return inheritance.definer(bases(type(value))[:-1], name) is not None or name in _own(value)


def _is_of_nnsight(cls: type) -> bool:
    return any(home(base).partition(".")[0] == "nnsight" for base in bases(cls)) and not (
        issubclass(cls, torch.Tensor | BaseException)
    )


def _is_of_library(cls: type) -> bool:
    """Return True if the module that a class names contains it, which a user cannot fake."""
    module = sys.modules.get(home(cls))
    return module is not None and vars(module).get(inheritance.class_name(cls)) is cls


def _check_text(name: object) -> None:
    if type(name) is not str:
        raise TypeError(f"attribute name must be string, not {type(name).__name__!r}")


def _check_denied(denied: Mapping[str, str], cls: type, name: str) -> None:
    """Raise AttributeError if `denied`, a mapping of names to reasons, contains `name`."""
    reason = denied.get(name)
    if reason is not None:
        raise AttributeError(
            f"{inheritance.class_name(cls)}.{name} is not available on this server: {reason}"
        )


def _class_of(value: Any) -> type:
    return value if issubclass(type(value), type) else type(value)


def _own(value: Any) -> Mapping[str, Any]:
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _label(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {inheritance.class_name(value)!r}"
    return f"{inheritance.class_name(type(value))!r}"
