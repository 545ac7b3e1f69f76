"""Deployments as an operator writes them: a YAML or JSON file, a JSON body, or a variable.

Each reading function raises a `DeploymentFileError` that lists every problem.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue, models_json_schema
from pydantic_core import CoreSchema

from ndif.errors import NdifError, quoted
from ndif.schema.answer import JsonObject
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_settings import (
    SETTING_NAMES,
    DeploymentChange,
    DeploymentEntry,
    DeploymentSettings,
    SettingsError,
    as_written,
    parse_change,
)

_MAX_MIB = 4
_VARIABLE = "the variable NDIF_DEPLOYMENTS"


class TextFileError(NdifError):
    """A file that cannot be read as text; the message names the file and the reason."""


class DeploymentFileError(NdifError):
    """Invalid deployments; each problem is a sentence with its location."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(slots=True)
class _Entry:
    """One model, before its name and settings are checked."""

    name: object
    fields: object
    line: int | None = None
    """Line of the file where the entry begins."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Lines of its fields."""


def schema() -> JsonObject:
    """Return the JSON Schema of a deployment file."""
    references, definitions = models_json_schema(
        [(DeploymentEntry, "validation"), (DeploymentSettings, "validation")]
    )
    entry, settings = references.values()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ndif deployments",
        "description": "Models to be deployed: a list, or a mapping from repo id to settings.",
        "$defs": definitions["$defs"],
        "anyOf": [
            {"type": "array", "items": {"anyOf": [{"type": "string"}, entry]}},
            {
                "type": "object",
                "additionalProperties": {"anyOf": [settings, {"type": "null"}]},
            },
        ],
    }


class AsInFile:
    """An annotation that gives a field the JSON Schema of a deployment file."""

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """See pydantic."""
        return handler(_DOCUMENT.core_schema)


_DOCUMENT: TypeAdapter[Any] = TypeAdapter(
    # Both models are created at run time, so mypy does not accept them as types.
    list[str | DeploymentEntry] | dict[str, DeploymentSettings | None]  # type: ignore[valid-type, arg-type]
)


def read_file(path: Path) -> tuple[DeploymentConfig, ...]:
    """Return the deployments in a YAML or JSON file."""
    return _configs(read_changes(path))


def read_changes(path: Path) -> tuple[DeploymentChange, ...]:
    """Return the models in a YAML or JSON file of at most 4 MiB, each with the settings that it gives."""
    try:
        text = read_text(path, _MAX_MIB)
    except TextFileError as error:
        raise DeploymentFileError([str(error)]) from error
    return read(text, str(path))


def read(text: str, source: str) -> tuple[DeploymentChange, ...]:
    """Return the models in YAML text, or in JSON if the name `source` ends in `.json`."""
    entries = _from_json(text, source) if source.endswith(".json") else _from_yaml(text, source)
    return _checked(entries, source)


def changes_from_value(value: object, source: str) -> tuple[DeploymentChange, ...]:
    """Return the models in a list or mapping of a JSON body, each with the settings that it gives."""
    return _checked(list(_entries(value, source)), source)


def from_variable(text: str) -> tuple[DeploymentConfig, ...]:
    """Return the models in NDIF_DEPLOYMENTS: repo ids or model keys, separated by "|"."""
    names = (name.strip() for name in text.split("|"))
    return _configs(_checked([_Entry(name, {}) for name in names if name], _VARIABLE))


def _configs(changes: Iterable[DeploymentChange]) -> tuple[DeploymentConfig, ...]:
    return tuple(change.config for change in changes)


def _checked(entries: list[_Entry], source: str) -> tuple[DeploymentChange, ...]:
    changes: list[DeploymentChange] = []
    problems: list[str] = []
    first: dict[str, _Entry] = {}
    for number, entry in enumerate(entries, start=1):
        label = quoted(entry.name) if isinstance(entry.name, str) else f"entry {number}"
        try:
            change = _change(entry)
        except SettingsError as error:
            problems += [
                f"{_place(source, entry.lines.get(name, entry.line))}: {label}: {sentence}"
                for name, sentence in error.problems.items()
            ]
            continue
        # A hub ignores the case of names, so names that differ only in case are duplicates.
        earlier = first.setdefault(str(change.config.key).lower(), entry)
        if earlier is not entry:
            before = f" (first in line {earlier.line})" if earlier.line else ""
            problems.append(
                f"{_place(source, entry.line)}: {label} appears more than once{before}."
            )
        changes.append(change)
    if problems:
        raise DeploymentFileError(problems)
    return tuple(changes)


def _place(source: str, line: int | None) -> str:
    return source if line is None else f"{source}, line {line}"


def _change(entry: _Entry) -> DeploymentChange:
    name, fields = entry.name, {} if entry.fields is None else entry.fields
    if not isinstance(fields, Mapping):
        raise SettingsError({"": f"Settings must be a mapping, not {quoted(fields)}."})
    if name is None:
        raise SettingsError(
            {"": "The entry has no repo_id, so clients could not request the model."}
        )
    if not isinstance(name, str):
        raise SettingsError({"": f"A repo id must be text, not {quoted(name)}: put it in quotes."})
    fields = {str(key): value for key, value in fields.items()}
    if "repo_id" in fields:
        raise SettingsError({"repo_id": "repo_id is already given by the entry's own name."})
    return parse_change(name, fields)


def _entries(value: object, source: str) -> Iterator[_Entry]:
    """Yield the models of a list or mapping, without line numbers."""
    if isinstance(value, Mapping):
        for name, fields in value.items():
            yield _Entry(name, fields)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, Mapping):
                yield _Entry(item.get("repo_id"), {k: v for k, v in item.items() if k != "repo_id"})
            else:
                yield _Entry(item, {})
    elif value is not None:
        raise DeploymentFileError(
            [
                f"{source} must hold a list of models or a mapping from repo id to settings, "
                f"not {quoted(value)}."
            ]
        )


def _from_json(text: str, source: str) -> list[_Entry]:
    twice: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in items]
        twice.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(items)

    try:
        value = json.loads(text, object_pairs_hook=pairs) if text.strip() else None
    except json.JSONDecodeError as error:
        raise DeploymentFileError(
            [f"{_place(source, error.lineno)}: this is not JSON: {error.msg}."]
        ) from error
    except (ValueError, RecursionError) as error:
        raise DeploymentFileError([f"{source} is not readable JSON: {error}."]) from error
    if twice:
        raise DeploymentFileError([f"{source}: {quoted(n)} appears more than once." for n in twice])
    return list(_entries(value, source))


def _from_yaml(text: str, source: str) -> list[_Entry]:
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            # `construct_document` folds merge keys into the nodes.
            marks = _marks(root, source)
            value = loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = error.problem or error.context or "it cannot be read"
        raise DeploymentFileError(
            [f"{_place(source, mark.line + 1 if mark else None)}: this is not YAML: {why}."]
        ) from error
    except DeploymentFileError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise DeploymentFileError([f"{source} is not readable YAML: {why}."]) from error
    entries = list(_entries(value, source))
    for number, entry in enumerate(entries):
        where = entry.name if isinstance(value, Mapping) else number
        entry.line, entry.lines = marks.get(where, (None, {}))
    return entries


def _marks(root: yaml.Node | None, source: str) -> dict[object, tuple[int, Mapping[str, int]]]:
    """Return the line of each entry and the lines of its fields, by the entry's name or index."""
    problems: list[str] = []
    marks: dict[object, tuple[int, Mapping[str, int]]] = {}
    if isinstance(root, yaml.MappingNode):
        names = _lines(root, source, problems)
        for key, value in root.value:
            if isinstance(key, yaml.ScalarNode):
                marks[key.value] = (names[key.value], _lines(value, source, problems))
    elif isinstance(root, yaml.SequenceNode):
        for number, item in enumerate(root.value):
            marks[number] = (item.start_mark.line + 1, _lines(item, source, problems))
    if problems:
        raise DeploymentFileError(problems)
    return marks


def _lines(node: yaml.Node, source: str, problems: list[str]) -> dict[str, int]:
    """Return the line of each key of a mapping; add repeated keys to `problems`."""
    lines: dict[str, int] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in lines:
            problems.append(
                f"{_place(source, line)}: {quoted(key.value)} appears more than once "
                f"(first in line {lines[key.value]})."
            )
        lines.setdefault(key.value, line)
    return lines


def to_entry(config: DeploymentConfig, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the deployment file entry for `config`.

    Settings at their defaults are left out unless they are among the `given` fields.
    """
    entry: dict[str, Any] = {"repo_id": config.repo_id}
    defaults = DeploymentConfig(config.repo_id, checkpoint=config.repo_id)
    for setting, name in SETTING_NAMES.items():
        value = getattr(config, name)
        if name in given or value != getattr(defaults, name):
            entry[setting] = as_written(name, value)
    return entry


def read_text(path: Path, max_mib: int) -> str:
    """Return the UTF-8 text of a file of at most `max_mib` MiB; raise a `TextFileError` otherwise."""
    max_bytes = max_mib * 1024**2
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise TextFileError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TextFileError(f"{path} is not text in UTF-8.") from error
    if len(content) > max_bytes:
        raise TextFileError(f"{path} is larger than {max_mib} MiB.")
    return text
