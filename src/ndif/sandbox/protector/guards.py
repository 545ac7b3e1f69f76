"""What stands in a user's code in place of an attribute access and whatever else can reach one.

Nothing here is bound to a name that a block can see (`transformer`); what a guard calls runs as it would
without. The common case, a public attribute of an object of which nothing is denied, is one call, one look
into a table and the access itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from RestrictedPython.transformer import INSPECT_ATTRIBUTES

from ndif.sandbox.protector import inheritance, names
from ndif.sandbox.protector.classes import ByClass, Classes
from ndif.sandbox.protector.formatting import WALKS, Texts
from ndif.sandbox.protector.inheritance import bases, home
from ndif.sandbox.protector.libraries import guard_copying, guard_pandas
from ndif.sandbox.protector.modules import Modules, ProtectedModule, UnauthorizedModule, UserModule
from ndif.sandbox.protector.objects import ProtectedObjects
from ndif.sandbox.protector.patterns import Matcher
from ndif.sandbox.protector.transformer import UNBOUND, private
from ndif.sandbox.protector.whitelist import Whitelist

_OURS = (ProtectedModule, UnauthorizedModule, UserModule)

_NOTHING: frozenset[str] = frozenset()
_MOUNTED = frozenset({"save"})


class _Everything:
    def __contains__(self, name: object) -> bool:
        return True


_EVERYTHING = _Everything()


class Guards:
    """All guards, by the names that the transformer calls them by: see `table`."""

    def __init__(self, whitelist: Whitelist, modules: Modules, protected: ProtectedObjects) -> None:
        self._whitelist = whitelist
        self._modules = modules
        self._protected = protected
        self._owned = Classes()
        self._denied = ByClass(whitelist.of_class)
        """What the whitelist denies of objects of a class, and why."""
        self._watched: ByClass[Container[str]] = ByClass(self._watch)
        """The names of attributes that take a closer look."""
        self._nnsights = ByClass(_is_nnsights)
        self.builtins: dict[str, Any] = {}
        self.attribute = self._fast()
        self.texts = Texts(self.read, self.item)
        guard_copying(self.owns)

    def table(self) -> dict[str, Callable[..., Any]]:
        """By the names that the transformer uses."""
        return {
            "attribute": self.attribute,
            "private": self.private,
            "written": self.written,
            "item": self._item(),
            "matched": Matcher(self.read).matched,
            "builtins": lambda: self._modules.builtins,
        }

    # --- reading -----------------------------------------------------------------------------------

    def _fast(self) -> Callable[[Any, str], Any]:
        watched, slow, wrap = self._watched, self._slow, self._wrap

        def attribute(value: Any, name: str) -> Any:
            if name in watched[type(value)]:
                return slow(value, name)
            result = getattr(value, name)
            if isinstance(result, ModuleType):
                return wrap(result)
            return result

        return attribute

    def read(self, value: Any, name: str) -> Any:
        """An attribute of which only the running code knows the name."""
        if type(name) is not str:
            raise TypeError(f"attribute name must be string, not {type(name).__name__!r}")
        return self.private(value, name) if private(name) else self.attribute(value, name)

    def private(self, value: Any, name: str) -> Any:
        """An attribute with an underscore, or of a frame, a generator or a traceback."""
        if name in names.CHECKED:
            return self._checked(value, name)
        if name not in names.ALLOWED and name not in names.PUBLIC:
            dunder = name.startswith("__") and name.endswith("__")
            allowed = name in names.OWN if dunder else name not in INSPECT_ATTRIBUTES
            if type(value) is UnauthorizedModule:
                value()  # raises: the module is what is not here, whatever of it was asked for
            if not (allowed and self.owns(value) and self._has_itself(value, name)):
                raise AttributeError(self._refusal(value, name))
        return self.attribute(value, name)

    def _refusal(self, value: Any, name: str) -> str:
        if name == "__class__":
            return "the attribute '__class__' is not available on this server; use type(...)"
        if name in names.BLOCKED | names.INHERITED | INSPECT_ATTRIBUTES:
            return f"the attribute {name!r} is not available on this server"
        return (
            f"the attribute {name!r} of {_kind(value)} is private, and not available on this server; "
            "only objects of your own classes give such"
        )

    def _watch(self, cls: type) -> Container[str]:
        if issubclass(cls, _OURS):
            # nnsight gives every object a `save`, which is no attribute of a module.
            return _MOUNTED if issubclass(cls, ProtectedModule) else _NOTHING
        if (
            issubclass(cls, ModuleType | type | super | torch.nn.Module)
            or self._nnsights[cls]
            or _is_of_models(cls)
        ):
            return _EVERYTHING
        if any(home(each).partition(".")[0] == "pandas" for each in bases(cls)):
            guard_pandas(self._whitelist)
        denied = self._denied[cls]
        if issubclass(cls, str):
            return frozenset(denied) | WALKS
        return frozenset(denied)

    def _slow(self, value: Any, name: str) -> Any:
        """An attribute of an object that takes a closer look."""
        kind = type(value)
        if issubclass(kind, str) and name in WALKS:
            return self.texts.guarded(self._plain(value, name))
        if issubclass(kind, ModuleType):
            module = self._wrap(value)
            if isinstance(module, ProtectedModule) and name in _MOUNTED:
                return self._modules.stored(module, name)
            return getattr(module, name)
        self._check(value, name)
        result = self._plain(value, name)
        if issubclass(kind, type | super):
            result = self.texts.guarded(result)
            value = inheritance.bound(value) if issubclass(kind, super) else value
            if issubclass(type(value), type):
                listing = issubclass(value, torch.nn.Module)
                return self._protected.given_by_class(name, result) if listing else result
        elif self._is_part(value, name):
            return result
        envoy = self._is_envoy(value)
        if envoy and name == "get":
            return functools.partial(self._get, value)
        return self._protected.given(name, result) if envoy or value in self._protected else result

    def _plain(self, value: Any, name: str) -> Any:
        result = getattr(value, name)
        return self._wrap(result) if isinstance(result, ModuleType) else result

    def _is_envoy(self, value: Any) -> bool:
        return self._nnsights[type(value)] and "_module" in _own(value)

    def _is_part(self, value: Any, name: str) -> bool:
        """Whether `name` is one that the model's author gave to a part of it, as T5's `decoder`."""
        if not self._is_envoy(value):
            return False
        own = _own(value)
        return name in own and name in getattr(own["_module"], "_modules", {})

    # --- what is denied ----------------------------------------------------------------------------

    def _check(self, value: Any, name: str) -> None:
        """See that nothing denies an object's attribute, whichever way it is asked for.

        Raises:
            AttributeError: if something does.
        """
        kind = type(value)
        if issubclass(kind, super):
            self._check_super(value, name)
        elif issubclass(kind, type):
            self._check_class(value, name, inheritance.searched(value))
        elif not self._is_part(value, name):
            self._check_object(value, name)

    def _check_object(self, value: Any, name: str) -> None:
        kind = type(value)
        self._check_denied(kind, name)
        if self._nnsights[kind]:
            self._protected.check_nnsight(value, name)
        if self._is_envoy(value) or value in self._protected:
            self._protected.check(value, name)

    def _check_super(self, value: Any, name: str) -> None:
        """What a `super()` gives is the bound object's: denied as if asked of that."""
        of, cls = inheritance.bound(value), inheritance.bound_as(value)
        if cls is None:
            return
        if issubclass(type(of), type):
            self._check_class(of, name, inheritance.remaining(value))
        else:
            self._check_object(of, name)
        if cls is not of and cls is not type(of):
            self._check_class(cls, name, inheritance.remaining(value))

    def _check_class(self, cls: type, name: str, classes: tuple[type, ...]) -> None:
        """`classes` are where the attribute is looked for.

        What a user's class has itself is the user's; what it inherits from a class of the server's takes
        the server's objects like that class's own.
        """
        if name in names.INHERITED:
            raise AttributeError(self._refusal(cls, name))
        self._check_denied(cls, name)
        origin = inheritance.definer(classes, name)
        if self._is_users(cls if origin is None else origin):
            return
        if self._nnsights[cls]:
            self._protected.check_nnsight(cls, name)
        known = bases(cls)
        module = issubclass(cls, torch.nn.Module) or inheritance.definer(known, "from_pretrained")
        if module or (self._nnsights[cls] and inheritance.definer(known, "_add_envoy")):
            self._protected.check(cls, name)

    def _check_denied(self, cls: type, name: str) -> None:
        reason = self._denied[cls].get(name)
        if reason is not None:
            raise AttributeError(
                f"{inheritance.called(cls)}.{name} is not available on this server: {reason}"
            )

    def _wrap(self, module: ModuleType) -> ModuleType:
        return self._modules.wrap(module)

    def _get(self, envoy: Any, path: str) -> Any:
        """`Envoy.get`, which walks a path."""
        for part in str(path).split("."):
            envoy = self.item(envoy, part) if part.isdigit() else self.read(envoy, part)
        return envoy

    # --- items -------------------------------------------------------------------------------------

    def _item(self) -> Callable[[Any, Any], Any]:
        watched, item = self._watched, self.item

        def guarded(value: Any, key: Any) -> Any:
            if watched[type(value)] is _EVERYTHING:
                return item(value, key)
            return value[key]

        return guarded

    def item(self, value: Any, key: Any) -> Any:
        """An item of an object that may take it for the name of an attribute."""
        if self._nnsights[type(value)] and "_module" in _own(value):
            if isinstance(key, str):
                key = str(key)
                return value[key] if key.isdigit() else self.read(value, key)
            if not isinstance(key, slice):
                key = key.__index__()
        return value[key]

    # --- ownership ---------------------------------------------------------------------------------

    def own(self, cls: type) -> None:
        """`cls` is one of the user's own."""
        self._owned.add(cls)

    def owns(self, value: Any) -> bool:
        """Whether `value` is of the user's own making: a class, an object of one, a module."""
        kind = type(value)
        if issubclass(kind, UserModule):
            return True
        if issubclass(kind, super):
            return self.owns(inheritance.bound(value))
        cls = value if issubclass(kind, type) else kind
        return self._is_users(cls) or any(each in self._owned for each in bases(cls))

    def _is_users(self, cls: type) -> bool:
        """Whether this very class is of the user's making, not only one that it inherits from."""
        if any(each in self._owned for each in (cls, *bases(type(cls)))):
            return True
        # One that is being made: its `class` statement has not ended yet.
        return any(self.own_function(each) for each in inheritance.content(cls).values())

    def _has_itself(self, value: Any, name: str) -> bool:
        """Whether a private attribute of what is the user's is not one that the server's classes give it.

        A class of the user's gives such as functions, which take any object of the server's class too.
        """
        if issubclass(type(value), super):
            classes = inheritance.remaining(value)
            value = inheritance.bound(value)
        else:
            classes = inheritance.searched(value if issubclass(type(value), type) else type(value))
        origin = inheritance.definer(classes, name)
        if origin in (None, object, type) or name in names.OWN_OF_CLASS or self._is_users(origin):
            return True
        return not issubclass(type(value), type) and not _is_of_models(origin)

    def own_function(self, value: Any) -> bool:
        """Whether `value` is a function that a user wrote."""
        return isinstance(value, FunctionType) and getattr(value, "__builtins__") is self.builtins  # noqa: B009

    # --- writing -------------------------------------------------------------------------------------

    def written(self, value: Any, name: str) -> Any:
        """`value`, of which the attribute `name` is about to be set or deleted.

        Raises:
            AttributeError: if it must not be.
        """
        self.check_write(value, name)
        return value

    def check_write(self, value: Any, name: str) -> None:
        """See `written`."""
        if type(value) in self._owned and not private(name):
            return
        if type(name) is not str:
            raise TypeError(f"attribute name must be string, not {type(name).__name__!r}")
        kind = type(value)
        if issubclass(kind, dataclasses.Field):
            raise AttributeError(f"cannot set {name!r} of a dataclass's field on this server")
        if name in UNBOUND or name in names.BLOCKED or name in INSPECT_ATTRIBUTES:
            raise AttributeError(f"the attribute {name!r} cannot be set on this server")
        if isinstance(value, ModuleType):
            if not isinstance(value, UserModule):
                raise AttributeError(
                    f"cannot modify the module {value.__name__!r}: it is protected"
                )
            return
        own = self.owns(value)
        if name.startswith("__") and name.endswith("__"):
            allowed = own or (name in names.WRITABLE and self.own_function(value))
            if not allowed and not (isinstance(value, BaseException) and name in names.CONTEXTUAL):
                raise AttributeError(f"the attribute {name!r} of {_kind(value)} cannot be set")
            return
        if own or self.own_function(value):
            return
        if name.startswith("_"):
            raise AttributeError(f"the attribute {name!r} of {_kind(value)} is private to it")
        if issubclass(kind, type) or isinstance(value, FunctionType | MethodType):
            raise AttributeError(f"cannot set {name!r} of {value!r}: it is not yours")
        if self._nnsights[kind]:
            self._protected.check_nnsight(value, name)
            # What nnsight itself lets one assign: `.output = …`.
            descriptor = getattr(kind, name, None)
            if not hasattr(type(descriptor), "__set__"):
                raise AttributeError(
                    f"cannot set {name!r} of {_kind(value)}: it is protected; what can be set are a "
                    "module's output, input and inputs, and a gradient"
                )
        elif value in self._protected:
            raise AttributeError(f"cannot set {name!r} of {_kind(value)}: it is protected")

    def set(self, value: Any, name: str, new: Any) -> None:
        """The `setattr` of a block."""
        self.check_write(value, name)
        setattr(value, name, new)

    def delete(self, value: Any, name: str) -> None:
        """The `delattr` of a block."""
        self.check_write(value, name)
        delattr(value, name)

    def _checked(self, value: Any, name: str) -> Callable[..., Any]:
        """`__getattr__`, `__setattr__` and their kind: functions that look at the name they are given."""
        method = getattr(value, name)
        unbound = isinstance(value, type)
        target = inheritance.bound(value) if issubclass(type(value), super) else value

        @functools.wraps(method, assigned=("__name__",), updated=())
        def checked(*arguments: Any) -> Any:
            of, rest = (arguments[0], arguments[1:]) if unbound else (target, arguments)
            if name in ("__setattr__", "__delattr__"):
                self.check_write(of, rest[0])
            else:
                self._check_read(of, rest[0])
            return method(*arguments)

        del checked.__wrapped__
        return checked

    def _check_read(self, value: Any, name: Any) -> None:
        if type(name) is not str:
            raise TypeError(f"attribute name must be string, not {type(name).__name__!r}")
        if self.owns(value):
            refused = name in (names.BLOCKED | INSPECT_ATTRIBUTES) - names.OWN
            given = not private(name) or name in names.ALLOWED or name in names.PUBLIC
            refused = refused or not (given or self._has_itself(value, name))
        else:
            refused = private(name) or self._watched[type(value)] is _EVERYTHING
        cls = value if issubclass(type(value), type) else type(value)
        if refused or (name in WALKS and issubclass(cls, str)):
            raise AttributeError(self._refusal(value, name))
        self._check(value, name)


def _is_nnsights(cls: type) -> bool:
    return any(home(each).partition(".")[0] == "nnsight" for each in bases(cls)) and not (
        issubclass(cls, torch.Tensor | BaseException)
    )


def _is_of_models(cls: type) -> bool:
    return home(cls).partition(".")[0] in ("transformers", "tokenizers", "peft")


def _own(value: Any) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {inheritance.called(value)!r}"
    return f"{inheritance.called(type(value))!r}"
