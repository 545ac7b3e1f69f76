"""The whitelist: the modules that a block may import, and the attributes of each that are denied."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from ndif.sandbox.protector.inheritance import bases, full_name
from ndif.sandbox.protector.names import words

_DENIED_SUBMODULES = {
    "tests": "it runs tests",
    "test": "it runs tests",
    "conftest": "it is part of a development tool",
}
"""Denied submodules of any library, with the reasons."""

# Each model process reads the whitelist: 9 ms in C, 45 ms in Python.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_BUILT_IN = Path(__file__).with_name("whitelist.yaml")


class ForbiddenError(pickle.UnpicklingError):
    """The payload holds a forbidden object; the message names the object."""


@dataclass(frozen=True, slots=True)
class WhitelistedModule:
    """A module that a block may import, with its submodules unless `strict`."""

    name: str
    strict: bool
    denied: Mapping[str, str]
    """Denied names below the module, dotted, with the reasons."""
    only: frozenset[str] | None
    """The only available attributes; None if all public ones are."""
    homes: frozenset[str]
    """Denied modules whose values are nevertheless available from this module."""

    def reason(self, path: str) -> str | None:
        """Return why `path`, a dotted name that starts with the module's, is denied; None if it is not."""
        parts = path.removeprefix(self.name).removeprefix(".").split(".")
        for length, part in enumerate(parts, 1):
            reason = self.denied.get(".".join(parts[:length])) or _DENIED_SUBMODULES.get(part)
            if reason is not None:
                return reason
        return None


@dataclass(frozen=True, slots=True)
class Whitelist:
    """The content of the whitelist files, by section; whitelist.yaml explains each section."""

    modules: dict[str, WhitelistedModule]
    objects: dict[str, dict[str, str]]
    """Denied attributes of instances, by the class's full name ("torch.Tensor")."""
    model: dict[str, str]
    nnsight: dict[str, str]
    deserialization: dict[str, set[str]]

    def find(self, name: str) -> WhitelistedModule | None:
        """Return the entry that permits an import of `name`; None if none does."""
        if name in self.modules:
            return self.modules[name]
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            entry = self.modules.get(".".join(parts[:length]))
            if entry is not None and not entry.strict:
                private = any(part.startswith("_") for part in parts[length:])
                return None if private or entry.reason(name) else entry
        return None

    def of_class(self, cls: type) -> Mapping[str, str]:
        """Return the denied attributes of a class's instances, with the reasons."""
        return {
            name: reason
            for base in bases(cls)
            for name, reason in self.objects.get(full_name(base), {}).items()
        }

    @classmethod
    def read(cls, extra: Path | None) -> Whitelist:
        """Read the project's own whitelist, extended by an operator's file.

        Raises:
            ValueError: If `extra` cannot be read or does not have the form of a whitelist.
        """
        read = cls({}, {}, {}, {}, {})
        for path in [_BUILT_IN, extra] if extra else [_BUILT_IN]:
            content = _load(path)
            for entry in _entries(content, "modules", path):
                module = _module(entry, path)
                read.modules[module.name] = module
            for entry in _entries(content, "objects", path):
                for name in _names(entry, "classes", path):
                    read.objects.setdefault(name, {}).update(_reasons(entry, "denied", path))
            read.model.update(_reasons(content, "model", path))
            read.nnsight.update(_reasons(content, "nnsight", path))
            for entry in _entries(content, "deserialization", path):
                name = _module_name(entry, "module", path)
                read.deserialization.setdefault(name, set()).update(_names(entry, "names", path))
        return read


_SECTIONS = words("modules objects model nnsight deserialization")


def _load(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(), _Loader)  # noqa: S506 - it is a safe one
    except OSError as error:
        raise ValueError(f"The whitelist {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The whitelist {path} is not YAML: {error}") from error
    content = {} if content is None else content
    sections = ", ".join(sorted(_SECTIONS))
    if not isinstance(content, dict):
        raise ValueError(f"The whitelist {path} must be a mapping of {sections}.")
    unknown = [str(key) for key in content if key not in _SECTIONS]
    if unknown:
        raise ValueError(
            f"The whitelist {path} has a section {unknown[0]!r}; it may have {sections}."
        )
    return content


def _entries(content: Mapping[str, Any], section: str, path: Path) -> list[dict[str, Any]]:
    entries = content.get(section) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"In the whitelist {path}, {section} must be a list of mappings.")
    return entries


def _module(entry: Mapping[str, Any], path: Path) -> WhitelistedModule:
    name = _module_name(entry, "name", path)
    strict = entry.get("strict", True)
    if not isinstance(strict, bool):
        raise ValueError(f"In the whitelist {path}, strict of {name} must be true or false.")
    unknown = entry.keys() - {"name", "strict", "denied", "only", "homes"}
    if unknown:
        raise ValueError(f"In the whitelist {path}, {name} has an unknown {sorted(unknown)[0]!r}.")
    only = frozenset(_names(entry, "only", path)) if "only" in entry else None
    homes = frozenset(_names(entry, "homes", path) if "homes" in entry else ())
    return WhitelistedModule(name, strict, _reasons(entry, "denied", path), only, homes)


def _module_name(entry: Mapping[str, Any], key: str, path: Path) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError(f"In the whitelist {path}, {key} must be the name of a module: {value!r}.")
    return value


def _names(entry: Mapping[str, Any], key: str, path: Path) -> list[str]:
    value = entry.get(key)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"In the whitelist {path}, {key} must be a list of names: {value!r}.")
    return value


def _reasons(entry: Mapping[str, Any], key: str, path: Path) -> dict[str, str]:
    value = entry.get(key) or {}
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(reason, str) for name, reason in value.items()
    ):
        raise ValueError(f"In the whitelist {path}, {key} must be a mapping of names to reasons.")
    return value
