"""Python's shared namespaces: the contents of modules, classes and the containers in them, and changes."""

from __future__ import annotations

import codecs
import collections
import ctypes
import encodings
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt

_VERSION = 24
"""Offset of a dictionary's version (PEP 509): one that nothing was put into since has the same.

CPython before 3.14 has one; `_versioned` finds out.
"""

_Container = list[Any] | set[Any] | collections.deque[Any]
_CONTAINERS = (list, set, collections.deque)
_NOT_INSTANCES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)

_CACHES = {
    ("linecache", "cache"),
    ("re", "_cache"),
    ("re", "_cache2"),
    ("re._compiler", "_cache"),
    ("sys", "path_importer_cache"),
    ("abc", "__annotations__"),
}
"""Modules' attributes that hold nothing but what can be found again."""


_ABSENT = object()


class Namespaces:
    """A shallow copy of every module, class and module-level instance, and of each container in them.

    Two looks at it cost what was changed in between, and not what there is: a dictionary says by its
    version that nothing was put into it. Taken in a zygote, so that all of its forks share the copies.
    """

    def __init__(self) -> None:
        """Note what is there now."""
        self._dicts: list[dict[Any, Any]] = []
        self._copies: list[dict[Any, Any]] = []
        self._owners: list[Any] = []
        """Of each dictionary, the class whose members it holds, or the name of whatever else has it."""
        self._containers: list[tuple[_Container, list[Any], str]] = []
        self._known: set[int] = set()
        self._modules = dict(sys.modules)
        self._add_all()
        for found, name in _of_codecs():
            self._add(found, name) if isinstance(found, dict) else self._add_container(found, name)
        self._functions = _Functions(_functions())
        self._versions = _Versions(self._dicts) if _versioned() else None

    def _add_all(self) -> None:
        """Add every module and class that is not there yet, and what is in it."""
        first = len(self._dicts)
        for name, module in self._modules.items():
            if isinstance(module, types.ModuleType):
                self._add(vars(module), name)
        for cls in _classes():
            self._add(_members(cls), cls)
        for at in range(first, len(self._dicts)):
            self._add_within(self._copies[at], self._owners[at])

    def _add(self, found: dict[Any, Any], owner: Any) -> None:
        if id(found) not in self._known:
            self._known.add(id(found))
            self._dicts.append(found)
            self._copies.append(dict.copy(found))
            self._owners.append(owner)

    def _add_container(self, found: _Container, name: str) -> None:
        if id(found) not in self._known:
            self._known.add(id(found))
            self._containers.append((found, list(found), name))

    def _add_within(self, members: dict[Any, Any], owner: Any) -> None:
        prefix = _named(owner)
        for name, value in members.items():
            if (prefix, name) in _CACHES:
                continue
            kind = type(value)  # what an object says of its class may be another
            if issubclass(kind, dict):
                self._add(value, f"{prefix}.{name}")
            elif kind in _CONTAINERS:
                self._add_container(value, f"{prefix}.{name}")
            elif isinstance(owner, str) and (attributes := _attributes(value)) is not None:
                self._add(attributes, f"{prefix}.{name}")

    def adopt(self, changes: Iterable[Change]) -> None:
        """Take what differs for what is to be."""
        for change in changes:
            if change.at is None:
                continue
            if change.members is not None:
                self._copies[change.at] = dict.copy(change.members)
            else:
                container, _, name = self._containers[change.at]
                self._containers[change.at] = (container, list(container), name)

    def inherit(self) -> None:
        """Adopt what a fork itself changes, and what it has loaded since.

        Locks are made anew, and a thread has another number; where the weights are on a GPU, much is loaded
        only once its driver has started.
        """
        self.adopt(self.changes())
        if len(sys.modules) != len(self._modules):
            self._modules = dict(sys.modules)
            self._add_all()
            self._functions = _Functions([*self._functions.all, *_functions()])
            if self._versions:
                self._versions = _Versions(self._dicts)
        self._functions.note()
        self.settle()

    def changes(self) -> list[Change]:
        """Return what differs now."""
        return [*self._changed_dicts(), *self._changed_containers()]

    def _changed_dicts(self) -> list[Change]:
        found: list[Change] = []
        for at in self._versions.changed() if self._versions else range(len(self._dicts)):
            now, before = self._dicts[at], self._copies[at]
            if now is sys.modules or (dict.__len__(now) == len(before) and _same(now, before)):
                continue
            found.append(Change(_named(self._owners[at]), at, now, before, self._owners[at]))
        return found

    def _changed_containers(self) -> list[Change]:
        found: list[Change] = []
        for at, (container, items, name) in enumerate(self._containers):
            if len(container) != len(items) or not all(map(is_, container, items)):
                found.append(Change(name, at, None, items, container))
        return found

    def modules(self) -> list[str]:
        """Return the names of modules that have come, gone or been replaced."""
        now = sys.modules
        if len(now) == len(self._modules) and _same(now, self._modules):
            return []
        names = {**self._modules, **now}
        return [name for name in names if now.get(name) is not self._modules.get(name)]

    def has(self, name: str) -> bool:
        """Return True for a module that there was."""
        return name in self._modules

    def restore_module(self, name: str) -> None:
        """Restore the earlier entry of `sys.modules`, or remove it if there was none."""
        if name in self._modules:
            sys.modules[name] = self._modules[name]
        else:
            del sys.modules[name]

    def adopt_module(self, name: str) -> None:
        """Take a module that has come for one that is to be there."""
        self._modules[name] = sys.modules[name]

    def patched(self) -> str | None:
        """Return the name of a function that runs other code, or has other defaults or attributes."""
        return self._functions.patched()

    def settle(self) -> None:
        """Take the dictionaries' versions for those of what is to be, once all is as it was."""
        if self._versions:
            self._versions.note()


class Change:
    """One namespace or container that differs."""

    def __init__(
        self, name: str, at: int | None, members: dict[Any, Any] | None, before: Any, owner: Any
    ) -> None:
        self.name = name
        self.at = at
        self.members = members
        self._before = before
        self._owner = owner

    def keys(self) -> list[Any]:
        """Return what of a namespace differs, by name."""
        now, before = self.members or {}, self._before if self.members is not None else {}
        return [
            key
            for key in {**dict.copy(before), **dict.copy(now)}
            if not _has_same(now, before, key)
        ]

    def restore(self) -> None:
        """Restore the namespace or container.

        Raises:
            TypeError: if it cannot be, as in a class of the interpreter's own.
        """
        if self.members is None:
            container = self._owner
            container.clear()
            container.update(self._before) if isinstance(container, set) else container.extend(
                self._before
            )
            return
        for key in self.keys():
            if isinstance(self._owner, type):
                if key in self._before:
                    type.__setattr__(self._owner, key, self._before[key])
                else:
                    type.__delattr__(self._owner, key)
            elif key in self._before:
                dict.__setitem__(self.members, key, self._before[key])
            else:
                dict.__delitem__(self.members, key)

    def __str__(self) -> str:
        names = ", ".join(sorted(str(key)[:50] for key in self.keys()[:5]))
        return f"{self.name} ({names})" if names else self.name


class _Functions:
    """The code, defaults and attributes of every function there is, as far as they can be replaced."""

    def __init__(self, functions: list[types.FunctionType]) -> None:
        self.all = functions
        offsets = _offsets()
        addresses = np.fromiter(map(id, functions), np.uint64, len(functions))
        start = int(addresses.min())
        size = int(addresses.max()) - start + max(offsets, default=0) + 8
        self._memory = _words(start, size)
        first = ((addresses - np.uint64(start)) // np.uint64(8)).astype(np.intp)
        self._at = [first + offset // 8 for offset in offsets]
        self.note()

    def note(self) -> None:
        """Take how they are now for how they are to be."""
        self._noted = [self._memory[at] for at in self._at]

    def patched(self) -> str | None:
        for at, noted in zip(self._at, self._noted, strict=True):
            changed = np.flatnonzero(self._memory[at] != noted)
            if len(changed):
                return str(self.all[int(changed[0])].__qualname__)
        return None


def _functions() -> list[types.FunctionType]:
    """Return every function that the collector knows, which those that are frozen are not among."""
    return [each for each in gc.get_objects() if type(each) is types.FunctionType]


def _words(start: int, size: int) -> npt.NDArray[np.uint64]:
    """Return this process's memory as an array, of which only what is known to be there may be read."""
    memory = memoryview((ctypes.c_char * size).from_address(start)).cast("B")
    return np.frombuffer(memory, np.uint64)


def _offsets() -> list[int]:
    """Return where in a function's memory its code, defaults and attributes are referred to."""

    def probe(_: int = 1, *, __: int = 2) -> None: ...

    probe.note = 1  # type: ignore[attr-defined]
    size = type(probe).__basicsize__ // 8
    words = list((ctypes.c_uint64 * size).from_address(id(probe)))
    parts = (probe.__code__, probe.__defaults__, probe.__kwdefaults__, vars(probe))
    return [8 * words.index(id(part)) for part in parts if id(part) in words]


class _Versions:
    """The versions of many dictionaries, read at once from where the interpreter keeps them."""

    def __init__(self, dicts: list[dict[Any, Any]]) -> None:
        addresses = np.fromiter((id(each) + _VERSION for each in dicts), np.uint64, len(dicts))
        start = int(addresses.min())
        size = int(addresses.max()) - start + 8
        self._memory = _words(start, size)
        self._at = ((addresses - np.uint64(start)) // np.uint64(8)).astype(np.intp)
        self._noted = self._memory[self._at]

    def changed(self) -> list[int]:
        """Return the indices of those into which something was put."""
        found: list[int] = np.flatnonzero(self._memory[self._at] != self._noted).tolist()
        return found

    def note(self) -> None:
        """Take the versions of now for those of what is to be."""
        self._noted = self._memory[self._at]


def _versioned() -> bool:
    """Return True if this interpreter's dictionaries tell by a version that they were changed."""

    def version() -> int:
        return ctypes.c_uint64.from_address(id(probe) + _VERSION).value

    probe: dict[Any, Any] = {"a": 1, "b": 2}
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 14):
        return False
    seen = [version()]
    for step in (
        lambda: probe.update(c=3),
        lambda: probe.update(a=2),
        lambda: probe.pop("b"),
        probe.clear,
    ):
        untouched = version()
        step()
        seen.append(version())
        if untouched != seen[-2]:
            return False
    return len(set(seen)) == len(seen)


def _same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    # The methods of `dict` itself: a subclass may have others, which import or compute.
    return all(map(is_, dict.keys(now), before)) and all(
        map(is_, dict.values(now), before.values())
    )


def _has_same(now: dict[Any, Any], before: dict[Any, Any], key: Any) -> bool:
    return dict.get(now, key, _ABSENT) is dict.get(before, key, _ABSENT)


def _classes() -> list[type]:
    """Return every class there is."""
    cls: type
    found: dict[type, None] = {object: None}
    waiting: list[type] = [object]
    while waiting:
        for cls in type.__subclasses__(waiting.pop()):
            if cls not in found:
                found[cls] = None
                waiting.append(cls)
    return list(found)


def _members(cls: type) -> dict[Any, Any]:
    """Return the dictionary behind a class's proxy of it."""
    (members,) = gc.get_referents(vars(cls))
    found: dict[Any, Any] = members
    return found


def _named(owner: Any) -> str:
    return owner if isinstance(owner, str) else f"{owner.__module__}.{owner.__qualname__}"


def _attributes(value: Any) -> dict[Any, Any] | None:
    """Return the attributes of an instance that has them in a dictionary."""
    if issubclass(type(value), _NOT_INSTANCES):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _of_codecs() -> Iterator[tuple[Any, str]]:
    """The interpreter's registries of codecs, which nothing but a search for who refers to them gives."""
    for found in gc.get_referrers(encodings.search_function):
        if type(found) is list and found[0] is encodings.search_function:
            yield found, "the codecs' search functions"
    for found in gc.get_referrers(codecs.strict_errors):
        if type(found) is dict and "strict" in found:
            yield found, "the codecs' error handlers"
