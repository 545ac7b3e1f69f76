"""A deployment: one model as an operator asks for it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from ndif.config.groups import ExecutionSettings
from ndif.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size
from ndif.errors import NdifError
from ndif.schema.model_key import NEWEST_CLASS, ModelKey
from ndif.schema.revision import require_revision

_TASKS: dict[str, tuple[str, ...]] = {
    "ForCausalLM": ("text-generation",),
    "LMHeadModel": ("text-generation",),
    "ForConditionalGeneration": (
        *("text-generation", "image-text-to-text", "any-to-any"),
        *("automatic-speech-recognition", "text-to-audio", "text-to-speech"),
    ),
    "ForMaskedLM": ("fill-mask",),
    "ForSequenceClassification": ("text-classification", "zero-shot-classification"),
    "ForTokenClassification": ("token-classification",),
    "ForImageClassification": ("image-classification", "zero-shot-image-classification"),
    "": (
        *("feature-extraction", "image-feature-extraction", "document-question-answering"),
        *("audio-classification", "automatic-speech-recognition", "depth-estimation"),
        *("image-segmentation", "keypoint-matching", "mask-generation", "object-detection"),
        *("table-question-answering", "text-to-audio", "text-to-speech", "video-classification"),
        *("zero-shot-audio-classification", "zero-shot-image-classification"),
        "zero-shot-object-detection",
    ),
}
"""Tasks of an architecture, by the end of its name in transformers.

The first one is the default; a model's card may name another.
"""

_LARGEST_CONFIG = 16 << 20


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError("must be more than 0 seconds")
    return seconds


def _absolute(checkpoint: str) -> str:
    """Expand `~`, and refuse relative paths: the process that loads a folder runs in another directory."""
    if checkpoint.startswith("."):
        raise ValueError("must be a repo id or the whole path of a folder")
    return str(Path(checkpoint).expanduser()) if checkpoint.startswith("~") else checkpoint


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": SIZE_PATTERN}]}
    ),
]
"""Bytes, or text like "12GiB"."""

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
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

_DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d+)?)$"


def _matching(pattern: str, reason: str) -> AfterValidator:
    """Return a validator of text against a pattern; `reason` is the message of its ValueError."""

    def check(text: str) -> str:
        if not re.match(pattern, text):
            raise ValueError(reason)
        return text

    return AfterValidator(check)


DeviceName = Annotated[
    str,
    _matching(_DEVICE_PATTERN, 'must be auto, cpu, cuda, or one GPU, like "cuda:0"'),
    WithJsonSchema({"type": "string", "pattern": _DEVICE_PATTERN}),
]
"""The device of a model: "auto", "cpu", "cuda" or "cuda:0"."""

_GENERATION_PATTERN = r"^\d+\.\d+$"


Generation = Annotated[
    str,
    _matching(_GENERATION_PATTERN, 'must be a generation of nnsight, like "0.8"'),
    WithJsonSchema({"type": "string", "pattern": _GENERATION_PATTERN}),
]
"""Major and minor version of nnsight: "0.8"."""

_Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class DeploymentConfig:
    """One model: its name for clients, and the settings by which it is loaded and kept.

    The annotations validate and describe the settings in deployment files, calendars and the API.
    `ndif.schema.deployment_settings` applies them; the constructor of this class does not.
    """

    repo_id: str
    checkpoint: Annotated[_Text, AfterValidator(_absolute)]
    revision: Annotated[
        Annotated[_Text, AfterValidator(require_revision)] | None,
        Field(description="Branch, tag or commit of the repository."),
    ] = None
    task: Annotated[
        _Text | None,
        Field(description="The transformers task. Default: the task of the model's architecture."),
    ] = None
    dtype: Annotated[
        _Text,
        Field(
            description="Data type of the weights, such as bfloat16. auto: the server's setting for every "
            "model, or else the checkpoint's."
        ),
    ] = "auto"
    device: Annotated[
        DeviceName | None,
        Field(description="Device, such as cuda:0, cpu or auto. Default: CUDA if there is a GPU."),
    ] = None
    attn_implementation: Annotated[
        _Text | None,
        Field(
            description="Attention implementation of requests that name none, such as requests of nnsight "
            "0.6, 0.7 and 0.8.0. eager allows reading attention weights. Default: transformers' choice."
        ),
    ] = None
    threads: Annotated[
        int, Field(ge=0, description="CPU threads of the model; 0: one per core.")
    ] = 0
    execution_timeout_s: Annotated[
        Duration | None,
        Field(
            alias="execution_timeout_seconds",
            description='Maximum run time of a request: seconds, or text like "15m". '
            "Default: the server's setting for every model.",
        ),
    ] = None
    replicas: Annotated[int, Field(ge=1, description="Number of replicas of the model.")] = 1
    max_replicas: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Field(
            description="Maximum number of replicas while requests wait. Default: the server's setting for "
            "every model."
        ),
    ] = None
    dedicated: Annotated[
        bool,
        Field(
            description="Never evict the model for other models, and serve it to users who may not load "
            "models on demand."
        ),
    ] = False
    size_bytes: Annotated[
        Size | None,
        Field(
            description='Memory of the weights: bytes, or text like "140GB". Default: the measured size.'
        ),
    ] = None
    padding_factor: Annotated[
        Annotated[float, Field(ge=0, allow_inf_nan=False)] | None,
        Field(
            description="Memory reserved in addition to the weights, as a fraction of their size. Default: "
            "the server's setting for every model.",
        ),
    ] = None
    padding_bytes: Annotated[
        Size | None,
        Field(
            description='Memory reserved in addition to padding_factor: bytes, or text like "12GiB". '
            "Default: the server's setting for every model."
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Field(description="Run Python code that comes with the checkpoint when it is loaded."),
    ] = False
    runtime: Annotated[
        Generation | None,
        Field(
            description='The only nnsight generation that the model is served to, in quotes: "0.8". '
            "Default: any that a client uses."
        ),
    ] = None
    generations: Annotated[
        tuple[Generation, ...],
        Field(
            strict=False,  # a list, in JSON and in YAML
            description='The nnsight generations for which the model is loaded: ["0.8", "0.7"]. '
            "Default: `runtime`, or else the newest that is installed.",
        ),
    ] = ()

    def __post_init__(self) -> None:
        # In a config that another process sent as JSON, this is a list.
        object.__setattr__(self, "generations", tuple(self.generations))

    @property
    def key(self) -> ModelKey:
        """The model's key as the newest clients write it."""
        return ModelKey(
            NEWEST_CLASS,
            self.repo_id,
            None if self.revision == "main" else self.revision,
            self.task,
        )

    @property
    def deployed_for(self) -> tuple[str, ...]:
        """The nnsight generations that the settings name; empty if the server chooses."""
        return self.generations or ((self.runtime,) if self.runtime is not None else ())

    @property
    def as_loaded(self) -> DeploymentConfig:
        """The settings that a loaded replica cannot change, for comparison with another config's."""
        return replace(
            self,
            repo_id="",
            task=None,
            replicas=0,
            max_replicas=None,
            dedicated=False,
            runtime=None,
            generations=(),
            size_bytes=None,
            padding_factor=None,
            padding_bytes=None,
        )


@dataclass(frozen=True, slots=True)
class Defaults:
    """The server's defaults for settings that a deployment leaves out."""

    dtype: str = "auto"
    padding_factor: float = 0.15
    padding_bytes: int = 0

    @classmethod
    def of(cls, settings: ExecutionSettings) -> Defaults:
        """Return the defaults that the server's variables set."""
        return cls(
            settings.default_dtype,
            settings.default_padding_factor,
            settings.default_padding_bytes,
        )

    def dtype_of(self, config: DeploymentConfig) -> str:
        """Return the data type of a deployment; "auto" for the checkpoint's."""
        return self.dtype if config.dtype == "auto" else config.dtype

    def padded(self, size_bytes: int, config: DeploymentConfig) -> int:
        """Return the bytes to reserve for a replica; `size_bytes` is the measured size of its weights.

        The deployment's own `size_bytes` overrides the measured size.
        """
        if config.size_bytes is not None:
            size_bytes = config.size_bytes
        factor, more = config.padding_factor, config.padding_bytes
        factor = self.padding_factor if factor is None else factor
        return math.ceil(size_bytes * (1 + factor)) + (self.padding_bytes if more is None else more)


def read_task(config: Path, card: str | None = None) -> str | None:
    """Return the task of the checkpoint with this `config.json`; see `task_of`.

    Return `card` if the file is too large or cannot be read.
    """
    try:
        if config.stat().st_size > _LARGEST_CONFIG:
            return card
        names = json.loads(config.read_text()).get("architectures") or []
        return task_of(names, card) if isinstance(names, list) else card
    except (OSError, ValueError, AttributeError, RecursionError):
        return card


def task_of(architectures: Iterable[Any], card: str | None = None) -> str | None:
    """Return the task of a model whose config names these architectures.

    Without architectures, return the card's task. If the first known architecture supports the card's task,
    return that task; else return the architecture's first one.
    """
    names = [str(name) for name in architectures]
    matches = [
        tasks for name in names for end, tasks in _TASKS.items() if end and name.endswith(end)
    ]
    if not names:
        return card
    tasks = matches[0] if matches else _TASKS[""]
    return card if card in tasks else tasks[0]


def explain_mismatch(config: DeploymentConfig, key: ModelKey) -> str | None:
    """Return a message for the client if `key` is not the model of `config`; None if it is."""
    served = f"This server serves {config.repo_id!r}"
    if key.repo_id.lower() != config.repo_id.lower():
        return f"{served}, not {key.repo_id!r}. Make the model with that name."
    mine, theirs = config.key.revision or "main", key.revision or "main"
    if mine != theirs:
        return f"{served} at revision {mine!r}, not {theirs!r}. Pass revision={mine!r} or none."
    if key.task and config.task and key.task != config.task:
        return (
            f"{served} for the task {config.task!r}, not {key.task!r}. "
            f"Pass task={config.task!r} when you make the model."
        )
    return None


class OperationError(NdifError):
    """A failed operation; the message states the reason and the remedy."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status of the answer: 400, 404, 409, …"""
