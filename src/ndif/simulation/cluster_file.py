"""The file that describes a cluster to simulate: YAML or JSON.

    nodes:
      - {name: a100, gpus: 8x80GiB, cpu_memory: 1TiB, count: 4}
    models:
      org/large: {size: 140GB, dedicated: true, replicas: 2}
      org/small: 5GB
    default_size: 16GB

A model may also have the settings of a deployment file. Everything else has the server's own defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ndif.config.units import parse_duration, parse_gpus, parse_size
from ndif.errors import NdifError, quoted
from ndif.errors import problems as found_in
from ndif.placement.demand import PlacementRules
from ndif.placement.node import Node
from ndif.placement.resources import Resources
from ndif.queue.autoscaler import Bounds
from ndif.queue.processor import QueuePolicy
from ndif.schema.deployment import DeploymentConfig, Duration, Size
from ndif.schema.deployment_file import TextFileError, read_text
from ndif.schema.deployment_settings import SettingsError, parse_deployment
from ndif.simulation.world import Speeds, World

_MOST_MIB = 16
_MOST_PROBLEMS = 10
_MOST_NODES = 10_000
_RULES, _BOUNDS, _SPEEDS = PlacementRules(), Bounds(most=4), Speeds()


class ClusterFileError(NdifError):
    """The file cannot be used; each problem is a sentence that names its place."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


def _gpus(value: object) -> tuple[int, ...]:
    if not isinstance(value, str):
        raise ValueError("must say how many GPUs and how large, like 8x80GiB")
    return parse_gpus(value)


Span = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, allow_inf_nan=False)]
"""A duration, 0 allowed."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Node(_Part):
    cpu_memory: Size
    gpus: Annotated[tuple[int, ...], BeforeValidator(_gpus)] = ()
    name: str | None = Field(default=None, min_length=1)
    count: int = Field(default=1, ge=1, le=_MOST_NODES)


class _RulesPart(_Part):
    minimum_deployment_time: Span = _RULES.minimum_deployment_time_s
    gpu_fraction_factor: float = _RULES.gpu_fraction_factor
    fraction_largest_possible: float = _RULES.fraction_largest_possible
    min_available_gpu_fraction: float = _RULES.min_available_gpu_fraction
    model_cache_percentage: float = Field(default=0.9, gt=0, le=1)
    drain_timeout: Span = 60.0
    execution_timeout: Duration = 3600.0

    @model_validator(mode="after")
    def _agree(self) -> _RulesPart:
        self.rules()
        return self

    def rules(self) -> PlacementRules:
        return PlacementRules(
            gpu_fraction_factor=self.gpu_fraction_factor,
            fraction_largest_possible=self.fraction_largest_possible,
            min_available_gpu_fraction=self.min_available_gpu_fraction,
            minimum_deployment_time_s=self.minimum_deployment_time,
        )


class _SpeedsPart(_Part):
    start_up: Span = _SPEEDS.start_up_s
    load_bytes_per_s: Size = int(_SPEEDS.load_bytes_per_s)
    warm_bytes_per_s: Size = int(_SPEEDS.warm_bytes_per_s)
    cache_bytes_per_s: Size = int(_SPEEDS.cache_bytes_per_s)
    cpu_slowdown: float = _SPEEDS.cpu_slowdown

    @model_validator(mode="after")
    def _agree(self) -> _SpeedsPart:
        self.speeds()
        return self

    def speeds(self) -> Speeds:
        return Speeds(
            self.start_up,
            self.load_bytes_per_s,
            self.warm_bytes_per_s,
            self.cache_bytes_per_s,
            self.cpu_slowdown,
        )


class _AutoscalePart(_Part):
    max_replicas: int = Field(default=_BOUNDS.most, ge=1)
    target_wait: Duration = _BOUNDS.target_wait_s
    idle: Duration = _BOUNDS.idle_s
    cooldown: Duration = _BOUNDS.cooldown_s
    backoff: Duration = _BOUNDS.backoff_s
    longest_backoff: Duration = _BOUNDS.longest_backoff_s

    @model_validator(mode="after")
    def _agree(self) -> _AutoscalePart:
        self.bounds()
        return self

    def bounds(self) -> Bounds:
        return Bounds(
            most=self.max_replicas,
            target_wait_s=self.target_wait,
            idle_s=self.idle,
            cooldown_s=self.cooldown,
            backoff_s=self.backoff,
            longest_backoff_s=self.longest_backoff,
        )


class _LinePart(_Part):
    head_start: Span = 60.0
    patience: int = Field(default=32, ge=1)
    max_attempts: int = Field(default=2, ge=1)


class _File(_Part):
    nodes: list[_Node] = Field(min_length=1)
    models: dict[str, Any] = Field(default_factory=dict)
    default_size: Size | None = None
    rules: _RulesPart = _RulesPart()
    speeds: _SpeedsPart = _SpeedsPart()
    autoscale: _AutoscalePart = _AutoscalePart()
    line: _LinePart = _LinePart()


def read_file(path: Path) -> World:
    """Read the cluster that a file describes.

    Raises:
        ClusterFileError: with every problem of the file.
    """
    try:
        text = read_text(path, _MOST_MIB)
    except TextFileError as error:
        raise ClusterFileError([str(error)]) from error
    return read(text, str(path))


def read(text: str, source: str) -> World:
    """Read the cluster that YAML or JSON text describes; errors call the text `source`.

    Raises:
        ClusterFileError: with every problem of the text.
    """
    value = _parsed(text, source)
    if not isinstance(value, Mapping):
        raise ClusterFileError([f"{source} must hold nodes and models, not {quoted(value)}."])
    problems: list[str] = []
    file = None
    try:
        file = _File.model_validate({str(key): part for key, part in value.items()})
    except ValidationError as error:
        problems += [f"{source}: {problem.sentence}" for problem in found_in(error)]
    models = value.get("models")
    configs: list[DeploymentConfig] = []
    sizes: dict[str, int] = {}  # by repository id as written
    seen: set[str] = set()
    for name, entry in models.items() if isinstance(models, Mapping) else ():
        try:
            config, weights = _model(str(name), entry)
        except SettingsError as error:
            problems += [f"{source}: {quoted(name)}: {said}" for said in error.problems.values()]
            continue
        if config.repo_id.lower() in seen:
            problems.append(f"{source}: {quoted(name)} is there more than once.")
        seen.add(config.repo_id.lower())
        if isinstance(entry, Mapping) and entry.keys() != {"size"}:
            configs.append(config)  # with a size alone, only users request it
        sizes[config.repo_id] = weights
    if problems or file is None:
        raise ClusterFileError(problems[:_MOST_PROBLEMS])
    return _world(file, configs, sizes)


def _parsed(text: str, source: str) -> object:
    try:
        return json.loads(text) if source.endswith(".json") else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        place = f"{source}, line {error.lineno}"
        raise ClusterFileError([f"{place}: this is no JSON: {error.msg}."]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        why = error.problem or error.context or "it cannot be read"
        raise ClusterFileError([f"{place}: this is no YAML: {why}."]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ClusterFileError([f"{source} cannot be read: {why}."]) from error


def _model(name: str, entry: object) -> tuple[DeploymentConfig, int]:
    """Return a model's settings and the bytes of its weights."""
    fields = entry if isinstance(entry, Mapping) else {"size": entry}
    settings = {str(key): value for key, value in fields.items() if key != "size"}
    try:
        config = parse_deployment(name, settings)
    except SettingsError as error:
        problems = dict(error.problems)
    else:
        problems = {}
    try:
        weights = _weights(fields.get("size"))
    except ValueError as error:
        said = f", not {quoted(fields['size'])}" if "size" in fields else ""
        problems["size"] = f"size {error}{said}."
    if problems:
        raise SettingsError(problems)
    return config, weights


def _weights(value: Any) -> int:
    weights = parse_size(value)
    if not weights:
        raise ValueError("must be more than nothing")
    return weights


def _world(file: _File, configs: list[DeploymentConfig], sizes: dict[str, int]) -> World:
    return World(
        nodes=tuple(_nodes(file)),
        models=tuple(configs),
        names=tuple(sizes),
        sizes={name.lower(): weights for name, weights in sizes.items()},
        default_size_bytes=file.default_size or None,
        rules=file.rules.rules(),
        drain_s=file.rules.drain_timeout,
        speeds=file.speeds.speeds(),
        autoscale=file.autoscale.bounds(),
        queue_policy=QueuePolicy(
            max_attempts=file.line.max_attempts,
            head_start_s=file.line.head_start,
            patience=file.line.patience,
        ),
        execution_timeout_s=file.rules.execution_timeout,
    )


def _nodes(file: _File) -> Iterator[Node]:
    part, number = file.rules.model_cache_percentage, 0
    for node in file.nodes:
        for index in range(node.count):
            name = node.name or f"node-{number}"
            name += f"-{index}" if node.name and node.count > 1 else ""
            resources = Resources.of(node.gpus, node.cpu_memory, part)
            yield Node(f"{number:04d}-{name}", name, resources)
            number += 1
