"""Detection and restoration of changes to modules, classes, and the containers in them."""

from __future__ import annotations

import codecs
import collections
import ctypes
import encodings
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

_VERSION = 24
"""Offset of a dictionary's version (PEP 509), which changes with every change of the dictionary.

CPython has versions before 3.14; `_has_versions` tests for them.
"""

_Container = list[Any] | set[Any] | collections.deque[Any]
_CONTAINERS = (list, set, collections.deque)
_NOT_INSTANCES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)

_CACHES = {
    ("linecache", "cache"),
    ("re", "_cache"),
    ("re", "_cache2"),
    ("re._compiler", "_cache"),
    ("warnings", "onceregistry"),
    ("sys", "path_importer_cache"),
    ("abc", "__annotations__"),
}
"""Attributes of modules that are caches of recomputable values; they are not tracked."""

_WARNED = "__warningregistry__"
"""The attribute in which Python records the warnings that a module's code has caused."""

_ABSENT = object()


class Namespaces:
    """A shallow copy of every module, class and module-level instance, and of each container in them.

    The copy serves to find and restore changes. The cost grows with the number of changes rather than the
    size of the namespaces, because an equal version proves that a dictionary is unchanged. The zygote
    creates the copy, so that all forks share it. A fork server creates one earlier, for the zygotes of all
    its models.
    """

    of_fork_server: ClassVar[Namespaces | None] = None
    """The namespaces of this process's fork server; None without one."""

    def __init__(self, *, functions: bool) -> None:
        """Copy all namespaces; with `functions`, also record the parts of every function."""
        self._finds_functions = functions
        self._dicts: list[dict[Any, Any]] = []
        self._copies: list[dict[Any, Any]] = []
        self._owners: list[Any] = []
        """The owner of each dictionary: the class whose members it holds, else a name."""
        self._containers: list[tuple[_Container, list[Any], str]] = []
        self._ids: set[int] = set()
        self._modules = dict(sys.modules)
        self._modules_version = DictVersions([sys.modules])
        # Objects that a fork server froze are invisible to the collector, but a request can change them.
        gc.unfreeze()
        self._add_all()
        for registry, name in _codec_registries():
            if isinstance(registry, dict):
                self._add(registry, name)
            else:
                self._add_container(registry, name)
        self._functions = _functions() if functions else []
        self._record_words()

    @classmethod
    def of_this_process(cls, *, functions: bool) -> Namespaces:
        """Return the namespaces of this process, if possible by extending the fork server's copy.

        With `functions`, a new copy is needed: only a new copy finds functions that a fork server froze.
        """
        namespaces = cls.of_fork_server
        if namespaces is None or functions:
            return cls(functions=functions)
        namespaces._extend()
        return namespaces

    def _extend(self) -> None:
        """Adopt all additions and changes since the copy was made."""
        changes = self._changes_without_warnings()
        self.adopt(changes)
        for change in changes:
            if change.members is not None:
                self._add_within(self._copies[change.at], self._owners[change.at])
        self._modules = dict(sys.modules)
        self._modules_version = DictVersions([sys.modules])
        self._add_all()
        self._record_words()

    def _record_words(self) -> None:
        self._function_parts = _Words(self._functions, _function_offsets())
        self._versions = DictVersions(self._dicts)
        self._record_items()

    def _record_items(self) -> None:
        """Record the addresses of the items in containers."""
        of_kind: dict[type, list[int]] = {kind: [] for kind in _CONTAINERS}
        for at, (container, _, _) in enumerate(self._containers):
            of_kind[type(container)].append(at)
        self._deques = of_kind[collections.deque]
        self._items = [
            (
                of_kind[layout.kind],
                _Items([self._containers[at][0] for at in of_kind[layout.kind]], layout),
            )
            for layout in (_LIST, _SET)
        ]

    def _add_all(self) -> None:
        """Add every module and class that is not copied yet, with its contents."""
        first = len(self._dicts)
        for name, module in self._modules.items():
            if isinstance(module, types.ModuleType):
                members = vars(module)
                if id(members) not in self._ids:
                    members.pop(_WARNED, None)
                self._add(members, name)
        for cls in _classes():
            self._add(members_of(cls), cls)
        for at in range(first, len(self._dicts)):
            self._add_within(self._copies[at], self._owners[at])

    def _add(self, members: dict[Any, Any], owner: Any) -> None:
        if id(members) not in self._ids:
            self._ids.add(id(members))
            self._dicts.append(members)
            self._copies.append(copied(members))
            self._owners.append(owner)

    def _add_container(self, container: _Container, name: str) -> None:
        if id(container) not in self._ids:
            self._ids.add(id(container))
            self._containers.append((container, list(container), name))

    def _add_within(self, members: dict[Any, Any], owner: Any) -> None:
        prefix = _name_of(owner)
        for name, value in members.items():
            if (prefix, name) in _CACHES:
                continue
            kind = type(value)  # an object's `__class__` may name another class
            if issubclass(kind, dict):
                self._add(value, f"{prefix}.{name}")
            elif kind in _CONTAINERS:
                self._add_container(value, f"{prefix}.{name}")
            elif isinstance(owner, str) and (attributes := _attributes(value)) is not None:
                self._add(attributes, f"{prefix}.{name}")

    def adopt(self, changes: Sequence[Change]) -> None:
        """Replace the copies of changed contents by new ones."""
        for change in changes:
            if change.members is not None:
                self._copies[change.at] = copied(change.members)
            else:
                container, _, name = self._containers[change.at]
                self._containers[change.at] = (container, list(container), name)
        if any(change.members is None for change in changes):
            self._record_items()

    def inherit(self) -> None:
        """Adopt the changes that a fork itself makes, and the modules that it has loaded since.

        For example, locks are recreated, and the thread gets another id. If the weights are on a GPU, many
        modules are loaded only after the start of its driver.
        """
        self.adopt(self._changes_without_warnings())
        if len(sys.modules) != len(self._modules):
            self._modules = dict(sys.modules)
            self._add_all()
            if self._finds_functions:
                self._functions = [*self._functions, *_functions()]
            self._record_words()
        self._modules_version = DictVersions([sys.modules])
        if self._function_parts.changed():
            self._function_parts.record()
        self.settle()

    def _changes_without_warnings(self) -> list[Change]:
        """Return all changes, and remove the warning registries of changed modules.

        Registries found after a request then belong to that request. Unchanged modules are not written to,
        because that would cost a fork a page of memory for each.
        """
        changes = self.changes()
        for change in changes:
            if change.members is not None and isinstance(change.owner, str):
                change.members.pop(_WARNED, None)
        return changes

    def changes(self) -> list[Change]:
        """Return a `Change` for each namespace and container that has changed."""
        changes: list[Change] = []
        for at in self._versions.changed():
            now, before = self._dicts[at], self._copies[at]
            if now is sys.modules or has_same_members(now, before):
                continue
            changes.append(Change(_name_of(self._owners[at]), at, now, before, self._owners[at]))
        moved = (at[index] for at, items in self._items for index in items.changed())
        for at in (*self._deques, *moved):
            container, items, name = self._containers[at]
            if len(container) != len(items) or not all(map(is_, container, items)):
                changes.append(Change(name, at, None, items, container))
        return changes

    def restore_modules(self, is_of_a_library: Callable[[object], bool]) -> str:
        """Restore `sys.modules`, but keep new modules of libraries; return the name of one, or ""."""
        now, before, loaded = sys.modules, self._modules, ""
        for name in {**before, **now} if self._has_other_modules() else ():
            if _has_same(now, before, name):
                continue
            if name in before:
                now[name] = before[name]
            elif is_of_a_library(now[name]):
                before[name] = now[name]
                loaded = name
            else:
                del now[name]
        return loaded

    def _has_other_modules(self) -> bool:
        is_written = self._modules_version.changed()
        return bool(is_written) and not has_same_members(sys.modules, self._modules)

    def patched(self) -> str | None:
        """Return the name of a function whose code, defaults or attributes were replaced, else None."""
        changed = self._function_parts.changed()
        return str(self._functions[changed[0]].__qualname__) if changed else None

    def settle(self) -> None:
        """Record the present versions; call this when all changes are restored or adopted."""
        self._modules_version.record()
        self._versions.record()


@dataclass(frozen=True, slots=True)
class Change:
    """A namespace or container that has changed."""

    name: str
    at: int
    members: dict[Any, Any] | None
    """The present members of a namespace; None for a container."""
    before: Any
    owner: Any
    """The class whose members a namespace holds, or the container."""

    def keys(self) -> list[Any]:
        """Return the names whose values differ in a namespace; [] for a container."""
        now, before = self.members, self.before
        if now is None:
            return []
        members = {**before, **copied(now)}
        return [key for key in members if not _has_same(now, before, key)]

    def restore(self) -> None:
        """Restore the namespace or container; raise TypeError for a built-in class."""
        if self.members is None:
            self.owner.clear()
            fill = self.owner.update if isinstance(self.owner, set) else self.owner.extend
            fill(self.before)
            return
        for key in self.keys():
            if isinstance(self.owner, type):
                if key in self.before:
                    type.__setattr__(self.owner, key, self.before[key])
                else:
                    type.__delattr__(self.owner, key)
            elif key in self.before:
                dict.__setitem__(self.members, key, self.before[key])
            else:
                dict.__delitem__(self.members, key)

    def __str__(self) -> str:
        names = ", ".join(sorted(str(key)[:50] for key in self.keys()[:5]))
        return f"{self.name} ({names})" if names else self.name


def _functions() -> list[types.FunctionType]:
    """Return every function that the garbage collector tracks, which excludes frozen ones."""
    return [obj for obj in gc.get_objects() if type(obj) is types.FunctionType]


class _Words:
    """The 64-bit words at certain offsets in the memory of many objects, read in bulk with numpy.

    The array spans all memory between the objects, but only the objects' own words may be read. Reading in
    the order of addresses takes a third of the time.
    """

    def __init__(self, objects: Sequence[Any], offsets: Sequence[int]) -> None:
        addresses = np.fromiter(map(id, objects), np.uint64, len(objects))
        self._order = np.argsort(addresses)
        self._per_object = len(offsets)
        words = addresses[self._order, None] + np.array(offsets, np.uint64)
        self._memory, self._at = _map_words(words.ravel())
        self._recorded = self._memory[self._at]
        self._changed_indices = _NO_INDICES
        """Indices of the words that the last `changed` found to differ."""

    def record(self) -> None:
        """Record the present values of the words that the last `changed` found to differ."""
        self._recorded[self._changed_indices] = self._memory[self._at[self._changed_indices]]
        self._changed_indices = _NO_INDICES

    def values(self) -> npt.NDArray[np.uint64]:
        """Return the recorded words, one row per object."""
        rows = np.empty((len(self._order), self._per_object), np.uint64)
        rows[self._order] = self._recorded.reshape(rows.shape)
        return rows

    def changed(self) -> list[int]:
        """Return the sorted indices of the objects with a changed word."""
        self._changed_indices = _differing(self._memory, self._at, self._recorded)
        indices: list[int] = np.unique(
            self._order[self._changed_indices // self._per_object]
        ).tolist()
        return indices


def _map_words(
    addresses: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
    """Return an array over the memory that spans all these words, and the index of each word in it."""
    if not len(addresses):
        return np.empty(0, np.uint64), np.empty(0, np.intp)
    start = int(addresses.min())
    words = (int(addresses.max()) - start) // 8 + 1
    places = ((addresses - np.uint64(start)) // np.uint64(8)).astype(np.intp)
    return np.asarray(_Span(start, words)), places


class _Span:
    """The words at and after an address, for numpy. A ctypes array would create a class for each size."""

    def __init__(self, start: int, words: int) -> None:
        self.__array_interface__ = {
            "data": (start, True),  # read only
            "shape": (words,),
            "typestr": np.dtype(np.uint64).str,
            "version": 3,
        }


_PIECE = 1 << 13
"""Words compared at once: few enough to stay in the CPU's cache and to need no new memory."""
_NO_INDICES = np.empty(0, np.intp)


def _differing(
    memory: npt.NDArray[np.uint64], at: npt.NDArray[np.intp], recorded: npt.NDArray[np.uint64]
) -> npt.NDArray[np.intp]:
    """Return the indices within `at` whose words in `memory` differ from the `recorded` ones."""
    now = np.empty(min(_PIECE, len(at)), np.uint64)
    indices = []
    for start in range(0, len(at), _PIECE):
        places = at[start : start + _PIECE]
        piece = memory.take(places, mode="clip", out=now[: len(places)])
        differ = piece != recorded[start : start + _PIECE]
        if differ.any():
            indices.append(start + np.flatnonzero(differ))
    return np.concatenate(indices) if indices else _NO_INDICES


@dataclass(frozen=True)
class _Layout:
    """The memory layout of a container type: header words, and an array with the address of each item."""

    kind: type
    words: tuple[int, ...]
    """Offsets of the header words that show a change: first the array's address, then its length."""
    length_less: int
    """The array's length minus the header word for it."""
    stride: int
    """Bytes from one item to the next."""


_LIST = _Layout(list, (24, 16), 0, 8)
_SET = _Layout(set, (40, 32, 24, 16), 1, 16)
"""A hash table of addresses and hashes; the header holds its length minus one. See `_has_layout`."""


class _Items:
    """The item addresses of many containers of a type, read in bulk to find possible changes.

    The caller keeps the items alive, so that no other object can reuse an address.
    """

    def __init__(self, containers: Sequence[Any], layout: _Layout) -> None:
        self._count = len(containers)
        has_layout = containers and _has_layout(layout)
        self._headers = _Words(containers, layout.words) if has_layout else None
        if self._headers is None:
            return
        starts, lengths = self._headers.values()[:, :2].astype(np.int64).T
        lengths = lengths + layout.length_less
        self._owners = np.repeat(np.arange(self._count), lengths)
        """Index of each item's container."""
        positions = np.arange(len(self._owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        addresses = starts[self._owners] + layout.stride * positions
        self._memory, self._at = _map_words(addresses.astype(np.uint64))
        self._recorded = self._memory[self._at]

    def changed(self) -> list[int]:
        """Return the sorted indices of the containers that may have changed."""
        if self._headers is None:
            return list(range(self._count))
        moved = self._headers.changed()
        at, recorded, owners = self._at, self._recorded, self._owners
        if moved:
            # A resized container may have moved its items, and their old memory may be unmapped.
            stays = np.isin(owners, moved, invert=True)
            at, recorded, owners = at[stays], recorded[stays], owners[stays]
        differ = owners[_differing(self._memory, at, recorded)]
        return sorted({*moved, *differ.tolist()})


class DictVersions:
    """The versions of many dictionaries, read in bulk to find possible changes."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._count = len(dicts)
        self._words = _Words(dicts, [_VERSION]) if dicts and _has_versions() else None

    def changed(self) -> Sequence[int]:
        """Return the indices of dictionaries that may have changed; without versions, all indices."""
        return range(self._count) if self._words is None else self._words.changed()

    def record(self) -> None:
        """Record the present versions."""
        if self._words is not None:
            self._words.record()


class Lengths:
    """The lengths and array addresses of many lists, read in bulk to find resized ones."""

    def __init__(self, lists: Sequence[list[Any]]) -> None:
        self._count = len(lists)
        self._words = _Words(lists, _LIST.words) if lists and _has_layout(_LIST) else None

    def changed(self) -> Sequence[int]:
        """Return the indices of lists that may have changed; with an unknown layout, all indices."""
        return range(self._count) if self._words is None else self._words.changed()


def _function_offsets() -> list[int]:
    """Return the offsets of code, defaults and attributes in a function object."""

    def probe(_: int = 1, *, __: int = 2) -> None: ...

    probe.note = 1  # type: ignore[attr-defined]
    size = type(probe).__basicsize__ // 8
    words = list((ctypes.c_uint64 * size).from_address(id(probe)))
    parts = (probe.__code__, probe.__defaults__, probe.__kwdefaults__, vars(probe))
    return [8 * words.index(id(part)) for part in parts if id(part) in words]


@functools.cache
def _has_layout(layout: _Layout) -> bool:
    """Return True if this interpreter's containers have this layout."""
    items = [object() for _ in range(50)]  # more than a set stores in its own object
    for count in (3, len(items)):
        container = layout.kind(items[:count])
        start, length, *counts = (
            ctypes.c_ssize_t.from_address(id(container) + at).value for at in layout.words
        )
        length += layout.length_less
        if not count <= length <= 8 * count or counts != [count] * len(counts):
            return False
        words = (ctypes.c_size_t * (length * layout.stride // 8)).from_address(start)
        if sorted(filter(None, words[:: layout.stride // 8])) != sorted(map(id, items[:count])):
            return False
    return True


@functools.cache
def _has_versions() -> bool:
    """Return True if every change of a dictionary changes its version in this interpreter."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 14):
        return False

    class Probe:
        def __init__(self) -> None:
            self.a, self.b = 1, 2

    instance = Probe()
    probe = vars(instance)
    version = ctypes.c_uint64.from_address(id(probe) + _VERSION)

    def assign() -> None:
        instance.a += 1

    changes: list[Callable[[], Any]] = [
        lambda: probe.update(c=3),
        lambda: probe.update(a=2),
        # Often enough for the interpreter to specialize the assignment of the attribute.
        *[assign] * 50,
        lambda: probe.pop("b"),
        probe.clear,
    ]
    versions = {version.value}
    for change in changes:
        change()
        versions.add(version.value)
    return len(versions) == len(changes) + 1


def copied(members: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of the stored items of a dictionary, without calling methods of a subclass.

    A subclass may compute its items: a subclass in transformers instantiates every activation function.
    """
    return dict(dict.items(members))


def has_same_members(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Return True if both have identical keys and values in the same order."""
    # Methods that a subclass of `dict` overrides may import or compute.
    return (
        dict.__len__(now) == len(before)
        and all(map(is_, dict.keys(now), before))
        and all(map(is_, dict.values(now), before.values()))
    )


def _has_same(now: dict[Any, Any], before: dict[Any, Any], key: Any) -> bool:
    return dict.get(now, key, _ABSENT) is dict.get(before, key, _ABSENT)


def _classes() -> list[type]:
    """Return every class of this process."""
    classes: dict[type, None] = {object: None}
    queue: list[type] = [object]
    while queue:
        subclasses: list[type] = type.__subclasses__(queue.pop())
        new = dict.fromkeys(cls for cls in subclasses if cls not in classes)
        classes.update(new)
        queue += new
    return list(classes)


def members_of(cls: type) -> dict[Any, Any]:
    """Return the dictionary behind a class's read-only `__dict__`."""
    members: dict[Any, Any]
    (members,) = gc.get_referents(vars(cls))
    return members


def _name_of(owner: Any) -> str:
    return owner if isinstance(owner, str) else f"{owner.__module__}.{owner.__qualname__}"


def _attributes(value: Any) -> dict[Any, Any] | None:
    """Return an instance's `__dict__`; None if it has none."""
    if issubclass(type(value), _NOT_INSTANCES):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _codec_registries() -> Iterator[tuple[Any, str]]:
    """Yield the interpreter's codec registries, which only a search for referrers finds."""
    for registry in gc.get_referrers(encodings.search_function):
        if type(registry) is list and registry[0] is encodings.search_function:
            yield registry, "the codecs' search functions"
    for registry in gc.get_referrers(codecs.strict_errors):
        if type(registry) is dict and "strict" in registry:
            yield registry, "the codecs' error handlers"
