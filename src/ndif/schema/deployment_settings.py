"""Validation of one deployment's settings from a file, the API, a calendar or a command line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from ndif.config.units import Unit, format_exactly
from ndif.errors import NdifError, quoted
from ndif.errors import problems as problems_in
from ndif.schema.answer import answer
from ndif.schema.deployment import DeploymentConfig, read_task
from ndif.schema.model_key import NEWEST_CLASS, ModelKey, explain_class

_REPO_ID = re.compile(r"[\w.\-]{1,200}(/[\w.\-]{1,200})?")

_HINTS = get_type_hints(DeploymentConfig, include_extras=True)
_SETTINGS = {field.name: field.default for field in dataclasses.fields(DeploymentConfig)[2:]}

DeploymentSettings: type[BaseModel] = create_model(
    "DeploymentSettings",
    __config__=ConfigDict(extra="forbid", strict=True, frozen=True),
    __doc__="Settings of one model: how it is loaded and kept.",
    checkpoint=(
        _HINTS["checkpoint"] | None,
        Field(
            default=None,
            description="Source of the weights: a repo id, or the whole path of a folder. "
            "Default: the repo id by which clients ask for the model.",
        ),
    ),
    **{name: (_HINTS[name], default) for name, default in _SETTINGS.items()},  # type: ignore[call-overload]
)
"""The settings of a `DeploymentConfig` as a validating model."""

DeploymentEntry: type[BaseModel] = create_model(
    "DeploymentEntry",
    __base__=DeploymentSettings,
    __doc__="One model and its settings.",
    repo_id=(
        str,
        Field(
            min_length=1,
            description="The name by which clients ask for the model, or a whole model key.",
        ),
    ),
)

SETTING_NAMES = {
    field.alias or name: name for name, field in DeploymentSettings.model_fields.items()
}
"""Fields of `DeploymentConfig` by the setting names that operators write."""

_RENAMED = {"pinned": "dedicated", "padding_bias": "padding_bytes"}
"""Current names of settings by their accepted names in NDIF 0.1 files."""

_NOT_SETTINGS = {
    "trusted": "the blocks of every user are confined as their key says; if the repository's own code "
    "should run, write trust_remote_code",
    "gpus": "a model takes the fewest GPUs that hold it; size_bytes says how much it needs",
    "max_tp": "a model takes the fewest GPUs that hold it",
    "actor_class": "there is one kind of replica",
    "envoy_class": "the client's class decides",
}
"""Reasons why settings of NDIF 0.1 do not exist here, by name."""

_SYNONYMS = {
    "timeout": "execution_timeout_seconds",
    "execution_timeout": "execution_timeout_seconds",
    "execution_timeout_s": "execution_timeout_seconds",
    "padding": "padding_factor",
    "nnsight": "runtime",
    "generation": "runtime",
    "branch": "revision",
    "commit": "revision",
    "path": "checkpoint",
    "gpu": "device",
    "torch_dtype": "dtype",
}
"""Settings by common other names, for suggestions in errors."""


class SettingsError(NdifError):
    """Invalid settings; each problem is a sentence."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(" ".join(problems.values()))
        self.problems = dict(problems)
        """Sentences by field; "" for a problem that concerns no single field."""


def parse_model(name: str) -> ModelKey:
    """Return the model that a repo id or a whole model key names; raise a `ValueError` if it is invalid."""
    name = name.strip()
    if "{" in name:
        key = ModelKey.parse(name)
        if why := explain_class(key):
            raise ValueError(why)
        return key
    if not _REPO_ID.fullmatch(name) or name.startswith((".", "-")):
        raise ValueError(
            f"{quoted(name)} names no model: give a repo id, like openai-community/gpt2, or a model "
            "key, as model.to_model_key() gives it"
        )
    return ModelKey(NEWEST_CLASS, name)


@dataclass(frozen=True, slots=True)
class DeploymentChange:
    """The settings that an operator gives for one model; a known model keeps its other settings."""

    config: DeploymentConfig
    """The given settings, and defaults for the others."""
    given: frozenset[str]
    """Names of the fields of `config` that were given."""

    @classmethod
    def complete(cls, config: DeploymentConfig) -> DeploymentChange:
        """Return the change that sets every setting of a model."""
        return cls(config, frozenset(SETTING_NAMES.values()))

    def applied_to(self, current: DeploymentConfig) -> DeploymentConfig:
        """Return a known model's settings with this change; raise a `SettingsError` if they conflict."""
        # A deployment of a model that was scaled to 0 replicas requests at least one.
        base = dataclasses.replace(current, replicas=max(1, current.replicas))
        return _apply(base, {name: getattr(self.config, name) for name in self.given})


@answer()
class SettingDifference:
    """A changed setting of a model."""

    setting: str
    """Name of the setting in a deployment file."""
    before: Any
    """Value as in a deployment file; null for a default of the server or the model."""
    after: Any

    def __str__(self) -> str:
        return f"{self.setting} {_text(self.before)} → {_text(self.after)}"


def _text(value: Any) -> str:
    if value is None:
        return "default"
    return value if isinstance(value, str) else json.dumps(value)


def differences(before: DeploymentConfig, after: DeploymentConfig) -> list[SettingDifference]:
    """Return the settings in which two deployments of a model differ."""
    changes = []
    for setting, name in SETTING_NAMES.items():
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            written = as_written(name, old), as_written(name, new)
            changes.append(SettingDifference(setting=setting, before=written[0], after=written[1]))
    return changes


def as_written(name: str, value: Any) -> Any:
    """Return the value of a field as it is written in a deployment file, such as "12GiB"."""
    if value is None:
        return None
    if name.endswith("_bytes"):
        return format_exactly(value, Unit.BYTES)
    if name.endswith("_seconds"):
        return format_exactly(value, Unit.SECONDS)
    return list(value) if isinstance(value, tuple) else value


def parse_deployment(
    name: str, fields: Mapping[str, object], base: DeploymentConfig | None = None
) -> DeploymentConfig:
    """Return the deployment of the model `name` with the settings in `fields`.

    `base`, or else the defaults, provide the other settings. Raise a `SettingsError` with every problem.
    """
    key, given = _read(name, fields)
    return _apply(base or DeploymentConfig(key.repo_id, key.repo_id), given)


def parse_change(name: str, fields: Mapping[str, object]) -> DeploymentChange:
    """Return the change of the model `name` to the settings in `fields`; raise a `SettingsError`."""
    key, given = _read(name, fields)
    config = _apply(DeploymentConfig(key.repo_id, key.repo_id), given)
    return DeploymentChange(config, frozenset(given))


def _read(name: str, fields: Mapping[str, object]) -> tuple[ModelKey, dict[str, Any]]:
    """Return the model `name` and its validated settings; raise a `SettingsError` with every problem."""
    problems: dict[str, str] = {}
    key = settings = None
    fields = dict(fields)
    for other, name_here in _RENAMED.items():
        if other in fields and fields.setdefault(name_here, fields[other]) == fields[other]:
            del fields[other]
    try:
        key = parse_model(name)
    except ValueError as error:
        problems[""] = f"{str(error).removesuffix('.')}."
    try:
        settings = DeploymentSettings.model_validate(fields)
    except ValidationError as error:
        for problem in problems_in(error):
            field = str(problem.location[0])
            problems[field] = (
                _unknown_setting(field) if problem.is_unknown else f"{field} {problem.reason}."
            )
    if key is None or settings is None:
        raise SettingsError(problems)
    given: dict[str, Any] = {field: getattr(settings, field) for field in settings.model_fields_set}
    for field in ("revision", "task"):
        named = getattr(key, field)
        if named is not None and given.setdefault(field, named) != named:
            problems[field] = f"{field} is {quoted(given[field])}, but the key says {named!r}."
    if problems:
        raise SettingsError(problems)
    if "generations" in given:
        given["generations"] = tuple(dict.fromkeys(given["generations"]))
    return key, given


def _apply(base: DeploymentConfig, given: Mapping[str, Any]) -> DeploymentConfig:
    """Return `base` with these settings; raise a `SettingsError` if settings contradict each other."""
    checkpoint = given.get("checkpoint") or base.checkpoint
    config = dataclasses.replace(base, **{**given, "checkpoint": checkpoint})
    problems = {}
    if config.max_replicas is not None and config.max_replicas < config.replicas:
        problems["max_replicas"] = (
            f"max_replicas is {config.max_replicas}, but replicas, the minimum, is {config.replicas}."
        )
    others = [
        generation for generation in config.generations if config.runtime not in (None, generation)
    ]
    if others:
        problems["generations"] = (
            f"generations has {', '.join(others)}, but runtime says that the model is served to "
            f"{config.runtime} alone."
        )
    if problems:
        raise SettingsError(problems)
    return config


def closest_setting(field: str) -> str | None:
    """Return the setting with this name, or the most similar one; None if none is similar."""
    names = [*SETTING_NAMES, "repo_id"]
    if field in names:
        return field
    close = get_close_matches(field.lower(), names, 1)
    return _SYNONYMS.get(field.lower()) or next(iter(close), None)


def _unknown_setting(field: str) -> str:
    if field in _RENAMED:
        return f"{field} is {_RENAMED[field]} here, which has another value: write one of the two."
    if field in _NOT_SETTINGS:
        return f"{field} is not a setting here: {_NOT_SETTINGS[field]}."
    if close := closest_setting(field):
        return f"{quoted(field)} is not a setting; did you mean {close!r}?"
    return f"{quoted(field)} is not a setting. There are: {', '.join(SETTING_NAMES)}."


def parse_checkpoint(argument: str, *, is_local: bool = True) -> DeploymentConfig:
    """Return the deployment that a command line's CHECKPOINT names; raise an `NdifError` if it is invalid.

    CHECKPOINT is ORG/NAME, a model key, or ORG/NAME=FOLDER. With `here`, the folder must be a checkpoint on
    this machine; otherwise it is an absolute path on the server's machine.
    """
    name, equals, place = argument.partition("=")
    if "{" in name or not equals:
        if "{" not in argument and _is_path(argument, is_local=is_local):
            raise NdifError(
                f"{argument} is a folder, and clients ask for a model by name: write ORG/NAME={argument}."
            )
        return parse_deployment(argument, {})
    parse_deployment(name, {})
    folder = Path(place).expanduser()
    if not is_local:
        if not folder.is_absolute():
            raise NdifError(
                f"{place} must be a folder of the server's machine: write its whole path."
            )
        return parse_deployment(name, {"checkpoint": str(folder)})
    if not folder.is_dir():
        raise NdifError(f"There is no folder {folder}.")
    if not (folder / "config.json").is_file():
        raise NdifError(f"{folder} holds no config.json: it is not a checkpoint's folder.")
    task = read_task(folder / "config.json")
    return parse_deployment(name, {"checkpoint": str(folder.resolve()), "task": task})


def _is_path(argument: str, *, is_local: bool) -> bool:
    return argument.startswith((".", "/", "~")) or (
        is_local and bool(argument) and Path(argument).is_dir()
    )
