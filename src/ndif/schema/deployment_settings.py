"""What can be said of one deployment: the settings, their limits, and errors in an operator's terms.

One model of them serves deployment files, the API and calendars, and is where their JSON Schema
comes from.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails

from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey
from ndif.schema.quantities import DURATION_PATTERN, SIZE_PATTERN, duration, size

_REPO_ID = re.compile(r"[\w.\-]{1,200}(/[\w.\-]{1,200})?")
_MOST_PROBLEMS = 10
_NEWEST_CLASS = "nnsight.modeling.transformers.TransformersModel"

Size = Annotated[
    int,
    BeforeValidator(size),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": SIZE_PATTERN}]}
    ),
]
"""Bytes, or text like "12GiB"."""


def _positive(seconds: float) -> float:
    if not 0 < seconds < float("inf"):
        raise ValueError("must be more than 0 seconds, and have an end")
    return seconds


Duration = Annotated[
    float,
    BeforeValidator(duration),
    AfterValidator(_positive),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": DURATION_PATTERN},
            ]
        }
    ),
]
"""Seconds, or text like "15m"."""


def _place(checkpoint: str) -> str:
    """A folder here by its whole path, because what reads the settings may run in another folder."""
    if checkpoint.startswith("."):
        raise ValueError("must be a repo id or the whole path of a folder")
    return str(Path(checkpoint).expanduser()) if checkpoint.startswith("~") else checkpoint


Generation = Annotated[str, Field(pattern=r"^\d+\.\d+$")]
"""Of nnsight: "0.8"."""


class DeploymentSettings(BaseModel):
    """How one model is to be loaded and kept."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    checkpoint: Annotated[str, Field(min_length=1), AfterValidator(_place)] | None = Field(
        default=None,
        description="Where the weights come from: a repo id, or the whole path of a folder. "
        "Default: the repo id by which clients ask.",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of the repository."
    )
    task: str | None = Field(
        default=None,
        min_length=1,
        description="The transformers task. Default: what the architecture is for.",
    )
    dtype: str = Field(
        default="auto", min_length=1, description="E.g. bfloat16; auto: the checkpoint's."
    )
    device: str | None = Field(
        default=None,
        min_length=1,
        description="E.g. cuda:0, cpu, auto. Default: CUDA where there is one.",
    )
    threads: int = Field(default=0, ge=0, description="Threads of the model; 0: one a core.")
    execution_timeout_seconds: Duration | None = Field(
        default=None,
        description='How long a request may run: seconds, or text like "15m". '
        "Default: what the server gives every model.",
    )
    replicas: int = Field(default=1, ge=1, description="Copies that share the model's requests.")
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        description="As many as there may be while its line is long. Default: what the server gives "
        "every model.",
    )
    dedicated: bool = Field(
        default=False,
        description="Never evicted, and open to users who may not have models loaded on demand.",
    )
    padding_factor: float = Field(
        default=0.15,
        ge=0,
        allow_inf_nan=False,
        description="Memory set aside beside the weights, as a part of their size.",
    )
    padding_bytes: Size = Field(
        default=0, description='And as a size of its own: bytes, or text like "12GiB".'
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the checkpoint when it is loaded.",
    )
    runtime: Generation | None = Field(
        default=None,
        description='The only nnsight generation it is served to, in quotes: "0.8". '
        "Default: whichever a client asks with.",
    )
    generations: tuple[Generation, ...] = Field(
        default=(),
        strict=False,  # a list, in JSON and in YAML
        description='The nnsight generations whose clients find it loaded: ["0.8", "0.7"]. '
        "Default: `runtime`, or else the newest that is installed.",
    )


class DeploymentEntry(DeploymentSettings):
    """One model and its settings."""

    repo_id: str = Field(
        min_length=1, description="The name by which clients ask for it, or a whole model key."
    )


class SettingsError(ValueError):
    """Settings that cannot be used; each problem is a sentence, and most name a field."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__(" ".join(problems.values()))
        self.problems = dict(problems)
        """By field; "" for what is about no field."""


def key_of(name: str) -> ModelKey:
    """The model that a repo id or a whole model key names.

    Raises:
        ValueError: with what is allowed.
    """
    name = name.strip()
    if "{" in name:
        return ModelKey.parse(name)
    if not _REPO_ID.fullmatch(name) or name.startswith((".", "-")):
        raise ValueError(
            f"{quoted(name)} names no model: give a repo id, like openai-community/gpt2, or a model "
            "key, as model.to_model_key() gives it"
        )
    return ModelKey(_NEWEST_CLASS, name)


def config_of(
    name: str, fields: Mapping[str, object], base: DeploymentConfig | None = None
) -> DeploymentConfig:
    """The deployment of the model `name` with the settings in `fields`, on top of those of `base`.

    Raises:
        SettingsError: with what is wrong.
    """
    problems: dict[str, str] = {}
    key = settings = None
    try:
        key = key_of(name)
    except ValueError as error:
        problems[""] = f"{str(error).removesuffix('.')}."
    try:
        settings = DeploymentSettings.model_validate(dict(fields))
    except ValidationError as error:
        problems.update(_sentence(detail, fields) for detail in error.errors()[:_MOST_PROBLEMS])
    if key is None or settings is None:
        raise SettingsError(problems)
    given = {field: getattr(settings, field) for field in settings.model_fields_set}
    for field in ("revision", "task"):
        named = getattr(key, field)
        if named is not None and given.setdefault(field, named) != named:
            problems[field] = f"{field} is {quoted(given[field])}, but the key says {named!r}."
    if problems:
        raise SettingsError(problems)
    if "execution_timeout_seconds" in given:
        given["execution_timeout_s"] = given.pop("execution_timeout_seconds")
    if "generations" in given:
        given["generations"] = tuple(dict.fromkeys(given["generations"]))
    if base is None:
        base = DeploymentConfig(repo_id=key.repo_id, checkpoint=key.repo_id)
    if given.get("checkpoint", "") is None:
        given["checkpoint"] = base.checkpoint
    config = replace(base, **given)
    if contradictions := _contradictions(config):
        raise SettingsError(contradictions)
    return config


def _contradictions(config: DeploymentConfig) -> dict[str, str]:
    found = {}
    if config.max_replicas is not None and config.max_replicas < config.replicas:
        found["max_replicas"] = (
            f"max_replicas is {config.max_replicas}, but replicas, of which there are never fewer, is "
            f"{config.replicas}."
        )
    others = [each for each in config.generations if config.runtime not in (None, each)]
    if others:
        found["generations"] = (
            f"generations has {', '.join(others)}, but runtime says that it is served to "
            f"{config.runtime} alone."
        )
    return found


def quoted(value: object) -> str:
    """A value as an error shows it: no more of it than a sentence can bear."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    try:
        return short.repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number too long to show"


_MEANT = {
    "pinned": "dedicated",
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
"""What people call a setting that has another name here."""


def nearest(field: str) -> str | None:
    """The setting of that name, or else the one that is most likely meant."""
    known = [*DeploymentEntry.model_fields]
    if field in known:
        return field
    close = get_close_matches(field.lower(), known, 1)
    return _MEANT.get(field.lower()) or next(iter(close), None)


def _no_setting(field: str) -> str:
    near = nearest(field)
    if near is not None:
        return f"{quoted(field)} is no setting; did you mean {near!r}?"
    known = ", ".join(DeploymentSettings.model_fields)
    return f"{quoted(field)} is no setting. There are: {known}."


_ALLOWED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "string_too_short": "text that is not empty",
    "tuple_type": 'a list, like ["0.8"]',
}


def _sentence(detail: ErrorDetails, fields: Mapping[str, object]) -> tuple[str, str]:
    field, *within = detail["loc"]
    field = str(field)
    if detail["type"] == "extra_forbidden":
        return field, _no_setting(field)
    value: Any = fields.get(field)
    for place in within if isinstance(value, list) else ():
        value = value[place]
    was = f", not {quoted(value)}"
    limits: dict[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "value_error":
            return field, f"{field} {limits['error']}{was}."
        case "greater_than_equal":
            return field, f"{field} must be at least {limits['ge']:g}{was}."
        case "string_pattern_mismatch":
            return field, f'{field} must be a generation of nnsight, like "0.8"{was}.'
        case "string_type" if isinstance(value, int | float):
            meant = f'"{quoted(value)}"' if within else f'{field}: "{quoted(value)}"'
            return field, f"{field} must be text{was}: put it in quotes, {meant}."
        case "string_type":
            return field, f"{field} must be text{was}."
        case kind if kind in _ALLOWED:
            return field, f"{field} must be {_ALLOWED[kind]}{was}."
    return field, f"{field}: {detail['msg']}{was}."
