"""The world of a simulation, and the YAML or JSON file that describes it.

    nodes:
      - {name: a100, gpus: 8x80GiB, cpu_memory: 1TiB, count: 4}
    models:
      org/large: {size: 140GB, dedicated: true, replicas: 2}
      org/small: 5GB
    default_size: 16GB

A model may also have the settings of a deployment file. All other fields default to the server's defaults.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from ndif.config.units import parse_duration, parse_gpus, parse_size
from ndif.errors import NdifError, quoted
from ndif.errors import problems as validation_problems
from ndif.placement.demand import PlacementRules
from ndif.placement.node import Node
from ndif.placement.resources import Resources
from ndif.queue.autoscaler import Bounds
from ndif.queue.processor import QueuePolicy
from ndif.schema.deployment import Defaults, DeploymentConfig, Duration, Size
from ndif.schema.deployment_file import TextFileError, read_text
from ndif.schema.deployment_settings import SettingsError, parse_deployment

_GIB = 1024**3
_MOST_MIB = 16
_MOST_PROBLEMS = 10
_MOST_NODES = 10_000
_RULES, _BOUNDS, _QUEUE_POLICY = PlacementRules(), Bounds(most=4), QueuePolicy()


class ClusterFileError(NdifError):
    """The file cannot be used; each line of the message is a problem with its location."""


def _gpus(value: object) -> tuple[int, ...]:
    if not isinstance(value, str):
        raise ValueError("must be the number of GPUs and their size, like 8x80GiB")
    return parse_gpus(value)


def _positive(bytes_per_s: int) -> int:
    if not bytes_per_s:
        raise ValueError("must be more than 0 bytes a second")
    return bytes_per_s


Span = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, allow_inf_nan=False)]
"""A duration that may be 0."""
Rate = Annotated[Size, AfterValidator(_positive)]
"""Bytes a second."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Speeds(_Part):
    """Speeds of the changes of a replica."""

    start_up: Span = 15.0
    """Seconds from a decision until the process begins to load weights."""
    load_bytes_per_s: Rate = 2 * _GIB
    """Speed of loading from disk, from COLD to HOT."""
    warm_bytes_per_s: Rate = 20 * _GIB
    """Speed of the return to the device, from WARM to HOT."""
    cache_bytes_per_s: Rate = 20 * _GIB
    """Speed of leaving the device, from HOT to WARM."""
    cpu_slowdown: float = Field(default=20.0, ge=1, allow_inf_nan=False)
    """Factor by which requests run longer on a replica without GPUs."""

    def loading_s(self, size_bytes: int) -> float:
        """Return the seconds until a new replica can run a request."""
        return self.start_up + size_bytes / self.load_bytes_per_s

    def returning_s(self, size_bytes: int) -> float:
        """Return the seconds until a WARM replica can run a request."""
        return size_bytes / self.warm_bytes_per_s

    def caching_s(self, size_bytes: int) -> float:
        """Return the seconds until a replica that becomes WARM has left its device."""
        return size_bytes / self.cache_bytes_per_s


class _Settings(_Part):
    """A part of the file with the fields of a server's class, which checks their combination.

    The file omits the suffix `_s` of fields in seconds, because its durations have units.
    """

    model_config = ConfigDict(alias_generator=lambda name: name.removesuffix("_s"))
    target: ClassVar[type[Any]]

    @model_validator(mode="after")
    def _check_combination(self) -> _Settings:
        try:
            self.make()
        except ValueError as error:
            names = {name: field.alias or name for name, field in type(self).model_fields.items()}
            # Use the names of the file, which have no `_s`.
            sentence = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
            raise ValueError(sentence) from None
        return self

    def make(self) -> Any:
        names = {field.name for field in dataclasses.fields(self.target)}
        return self.target(**self.model_dump(include=names))


class _Rules(_Settings):
    target = PlacementRules
    minimum_deployment_time_s: Span = _RULES.minimum_deployment_time_s
    gpu_fraction_factor: float = _RULES.gpu_fraction_factor
    fraction_largest_possible: float = _RULES.fraction_largest_possible
    min_available_gpu_fraction: float = _RULES.min_available_gpu_fraction
    model_cache_percentage: float = Field(default=0.9, gt=0, le=1)
    drain_s: Span = Field(default=_RULES.drain_s, alias="drain_timeout")
    execution_timeout_s: Duration = 3600.0


class _Autoscale(_Settings):
    target = Bounds
    most: int = Field(default=_BOUNDS.most, ge=1, alias="max_replicas")
    target_wait_s: Duration = _BOUNDS.target_wait_s
    idle_s: Duration = _BOUNDS.idle_s
    cooldown_s: Duration = _BOUNDS.cooldown_s
    backoff_s: Duration = _BOUNDS.backoff_s
    longest_backoff_s: Duration = _BOUNDS.longest_backoff_s


class _Queue(_Settings):
    target = QueuePolicy
    head_start_s: Span = _QUEUE_POLICY.head_start_s
    patience: int = Field(default=_QUEUE_POLICY.patience, ge=1)
    max_attempts: int = Field(default=_QUEUE_POLICY.max_attempts, ge=1)


class _Node(_Part):
    cpu_memory: Size
    gpus: Annotated[tuple[int, ...], BeforeValidator(_gpus)] = ()
    name: str | None = Field(default=None, min_length=1)
    count: int = Field(default=1, ge=1, le=_MOST_NODES)


class _File(_Part):
    nodes: list[_Node] = Field(min_length=1)
    models: dict[str, Any] = Field(default_factory=dict)
    default_size: Size | None = None
    rules: _Rules = _Rules()
    speeds: Speeds = Speeds()
    autoscale: _Autoscale = _Autoscale()
    line: _Queue = _Queue()


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """The empty cluster of a simulation, with models and rules."""

    nodes: tuple[Node, ...]
    models: tuple[DeploymentConfig, ...]
    """The operator's deployments; dedicated models are loaded first."""
    names: tuple[str, ...]
    """Repository ids of all models of known size, as written in the file."""
    sizes: Mapping[str, int]
    """Bytes of weights, by repository id in lower case."""
    default_size_bytes: int | None
    """Bytes of models that are not in `sizes`; None if `sizes` must have every model."""
    rules: PlacementRules
    speeds: Speeds
    autoscale: Bounds
    queue_policy: QueuePolicy
    execution_timeout_s: float
    """Seconds after which a request ends as ERROR, unless its model has its own limit."""

    def weights(self, repo_id: str) -> int | None:
        """Return the bytes of a model's weights; None if unknown."""
        return self.sizes.get(repo_id.lower(), self.default_size_bytes)

    def replica_bytes(self, config: DeploymentConfig) -> int | None:
        """Return the bytes of one replica, padding included; None if unknown."""
        weights = self.weights(config.repo_id)
        if weights is None:
            return None
        return max(Defaults().padded(weights, config), 1)


def read_file(path: Path) -> World:
    """Read the cluster that a file describes; raise a ClusterFileError with its first problems."""
    try:
        text = read_text(path, _MOST_MIB)
    except TextFileError as error:
        raise ClusterFileError(str(error)) from error
    return read(text, str(path))


def read(text: str, source: str) -> World:
    """Read the cluster that YAML or JSON text describes; `source` names the text in errors."""
    value = _parse(text, source)
    if not isinstance(value, Mapping):
        raise ClusterFileError(f"{source} must contain nodes and models, not {quoted(value)}.")
    problems: list[str] = []
    file = None
    try:
        file = _File.model_validate({str(key): part for key, part in value.items()})
    except ValidationError as error:
        problems += [f"{source}: {problem.sentence}" for problem in validation_problems(error)]
    models = value.get("models")
    configs: list[DeploymentConfig] = []
    sizes: dict[str, int] = {}  # by repository id as written
    repo_ids: set[str] = set()
    for name, entry in models.items() if isinstance(models, Mapping) else ():
        try:
            config, weights = _model(str(name), entry)
        except SettingsError as error:
            problems += [
                f"{source}: {quoted(name)}: {sentence}" for sentence in error.problems.values()
            ]
            continue
        if config.repo_id.lower() in repo_ids:
            problems.append(f"{source}: {quoted(name)} is listed more than once.")
        repo_ids.add(config.repo_id.lower())
        if isinstance(entry, Mapping) and entry.keys() != {"size"}:
            configs.append(
                config
            )  # a model with a size alone is not deployed, but users may request it
        sizes[config.repo_id] = weights
    if problems or file is None:
        raise ClusterFileError("\n".join(problems[:_MOST_PROBLEMS]))
    return World(
        nodes=tuple(_nodes(file)),
        models=tuple(configs),
        names=tuple(sizes),
        sizes={name.lower(): weights for name, weights in sizes.items()},
        default_size_bytes=file.default_size or None,
        rules=file.rules.make(),
        speeds=file.speeds,
        autoscale=file.autoscale.make(),
        queue_policy=file.line.make(),
        execution_timeout_s=file.rules.execution_timeout_s,
    )


def _parse(text: str, source: str) -> object:
    try:
        return json.loads(text) if source.endswith(".json") else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        place = f"{source}, line {error.lineno}"
        raise ClusterFileError(f"{place}: this is not JSON: {error.msg}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        why = error.problem or error.context or "it cannot be read"
        raise ClusterFileError(f"{place}: this is not YAML: {why}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ClusterFileError(f"{source} cannot be read: {why}.") from error


def _model(name: str, entry: object) -> tuple[DeploymentConfig, int]:
    """Return a model's settings and the bytes of its weights."""
    fields = entry if isinstance(entry, Mapping) else {"size": entry}
    problems: dict[str, str] = {}
    try:
        settings = {str(key): value for key, value in fields.items() if key != "size"}
        config = parse_deployment(name, settings)
    except SettingsError as error:
        problems.update(error.problems)
    try:
        weights = parse_size(fields.get("size"))  # type: ignore[arg-type]
        reason = None if weights else "must be more than 0 bytes"
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        hint = f", not {quoted(fields['size'])}" if "size" in fields else ""
        problems["size"] = f"size {reason}{hint}."
    if problems:
        raise SettingsError(problems)
    return config, weights


def _nodes(file: _File) -> Iterator[Node]:
    cache_share, number = file.rules.model_cache_percentage, 0
    for node in file.nodes:
        for index in range(node.count):
            name = node.name or f"node-{number}"
            name += f"-{index}" if node.name and node.count > 1 else ""
            resources = Resources.of(node.gpus, node.cpu_memory, cache_share)
            yield Node(f"{number:04d}-{name}", name, resources)
            number += 1
