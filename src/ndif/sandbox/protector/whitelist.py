"""The whitelist: which modules a block may import, and what of each it does not get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from ndif.sandbox.protector.inheritance import bases, full_name

_TOOLS = {"tests": "it runs tests", "test": "it runs tests", "conftest": "it belongs to a tool"}
"""Parts of libraries that nobody's block needs, wherever they are."""

_OWN = Path(__file__).with_name("whitelist.yaml")


@dataclass(frozen=True, slots=True)
class WhitelistedModule:
    """One module that a block may import, by itself or, where not `strict`, with its submodules."""

    name: str
    strict: bool = True
    denied: Mapping[str, str] = field(default_factory=dict)
    """Dotted names below the module, and why each is not there."""
    only: frozenset[str] | None = None
    homes: frozenset[str] = frozenset()
    """Modules that are not there, of which this one gives values all the same."""

    def covers(self, name: str) -> bool:
        """Whether `name` is this module or a submodule that comes with it."""
        return name == self.name or (not self.strict and name.startswith(self.name + "."))

    def reason(self, path: str) -> str | None:
        """Why `path`, a dotted name from the module's own on, is denied; None where it is not."""
        parts = path.removeprefix(self.name).removeprefix(".").split(".")
        for length in range(1, len(parts) + 1):
            found = self.denied.get(".".join(parts[:length])) or _TOOLS.get(parts[length - 1])
            if found is not None:
                return found
        return None


@dataclass(frozen=True, slots=True)
class Whitelist:
    """All of it; see whitelist.yaml for what the parts mean."""

    modules: Mapping[str, WhitelistedModule]
    objects: Mapping[str, Mapping[str, str]]
    """By class ("torch.Tensor")."""
    model: Mapping[str, str]
    nnsight: Mapping[str, str]
    deserialization: Mapping[str, frozenset[str]]

    def find(self, name: str) -> WhitelistedModule | None:
        """The entry that lets `name` be imported, None where nothing does."""
        entry = self.modules.get(name)
        if entry is not None:
            return entry
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            entry = self.modules.get(".".join(parts[:length]))
            if entry is not None and entry.covers(name):
                below = parts[length:]
                private = any(part.startswith("_") for part in below)
                return None if private or entry.reason(name) else entry
        return None

    def of_class(self, cls: type) -> Mapping[str, str]:
        """What objects of a class do not give, and why."""
        return {
            name: reason
            for each in bases(cls)
            for name, reason in self.objects.get(full_name(each), {}).items()
        }

    def available(self) -> str:
        """The modules' names, for an error message."""
        return ", ".join(sorted(name for name in self.modules if not name.startswith("_")))

    @classmethod
    def read(cls, extra: Path | None) -> Whitelist:
        """The project's own whitelist, extended by an operator's file.

        Raises:
            ValueError: if `extra` cannot be read or does not have this form.
        """
        modules: dict[str, WhitelistedModule] = {}
        objects: dict[str, dict[str, str]] = {}
        model: dict[str, str] = {}
        nnsight: dict[str, str] = {}
        deserialization: dict[str, frozenset[str]] = {}
        for path in [_OWN, extra] if extra else [_OWN]:
            content = _load(path)
            for entry in _entries(content, "modules", path):
                module = _module(entry, path)
                modules[module.name] = module
            for entry in _entries(content, "objects", path):
                for name in _names(entry, "classes", path):
                    objects.setdefault(name, {}).update(_reasons(entry, "denied", path))
            model.update(_reasons(content, "model", path))
            nnsight.update(_reasons(content, "nnsight", path))
            for entry in _entries(content, "deserialization", path):
                name = _text(entry, "module", path)
                allowed = deserialization.get(name, frozenset())
                deserialization[name] = allowed | set(_names(entry, "names", path))
        return cls(modules, objects, model, nnsight, deserialization)


_SECTIONS = {"modules", "objects", "model", "nnsight", "deserialization"}


def _load(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"The whitelist {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The whitelist {path} is not YAML: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ValueError(
            f"The whitelist {path} must be a mapping of {', '.join(sorted(_SECTIONS))}."
        )
    unknown = [str(key) for key in content if key not in _SECTIONS]
    if unknown:
        raise ValueError(
            f"The whitelist {path} has a section {unknown[0]!r}; it may have "
            f"{', '.join(sorted(_SECTIONS))}."
        )
    return content


def _entries(content: Mapping[str, Any], section: str, path: Path) -> list[dict[str, Any]]:
    entries = content.get(section) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"In the whitelist {path}, {section} must be a list of mappings.")
    return entries


def _module(entry: Mapping[str, Any], path: Path) -> WhitelistedModule:
    name = _text(entry, "name", path)
    strict = entry.get("strict", True)
    if not isinstance(strict, bool):
        raise ValueError(f"In the whitelist {path}, strict of {name} must be true or false.")
    unknown = entry.keys() - {"name", "strict", "denied", "only", "homes"}
    if unknown:
        raise ValueError(f"In the whitelist {path}, {name} has an unknown {sorted(unknown)[0]!r}.")
    only = frozenset(_names(entry, "only", path)) if "only" in entry else None
    homes = frozenset(_names(entry, "homes", path)) if "homes" in entry else frozenset()
    return WhitelistedModule(name, strict, _reasons(entry, "denied", path), only, homes)


def _text(entry: Mapping[str, Any], key: str, path: Path) -> str:
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
        raise ValueError(
            f"In the whitelist {path}, {key} must say why for every name: a mapping of names to texts."
        )
    return value
