"""What an operator asks to be served."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ndif.schema.model_key import ModelKey

_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
}
"""What an architecture's name says it is for (transformers' own naming)."""

_FALLBACK_TASK = "feature-extraction"


@dataclass(frozen=True, slots=True)
class DeploymentConfig:
    """One model, as it is to be loaded, and the name that clients give it."""

    repo_id: str
    checkpoint: str
    """A repo id, or a local folder."""
    revision: str | None = None
    task: str | None = None
    dtype: str = "auto"
    device: str | None = None
    threads: int = 0
    execution_timeout_s: float | None = None
    """None: what the server gives every model."""
    replicas: int = 1
    max_replicas: int | None = None
    """As many as there may be while its line is long. None: what the server gives every model."""
    dedicated: bool = False
    """Never evicted, and open to users who may not have models loaded on demand."""
    padding_factor: float = 0.15
    """Memory that is set aside beside the weights, as a part of their size."""
    padding_bytes: int = 0
    """And as a size of its own."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the checkpoint is run when it is loaded."""
    runtime: str | None = None
    """The only nnsight generation it is served to: "0.8". None: whichever a client asks with."""
    generations: tuple[str, ...] = ()
    """The nnsight generations it is deployed for. None: `runtime`, or else the newest there is."""

    def __post_init__(self) -> None:
        # Between processes it is JSON, which has no tuples.
        object.__setattr__(self, "generations", tuple(self.generations))

    @property
    def key(self) -> ModelKey:
        """The key under which the newest clients ask for it."""
        return ModelKey(
            "nnsight.modeling.transformers.TransformersModel",
            self.repo_id,
            None if self.revision == "main" else self.revision,
            self.task,
        )

    @property
    def deployed_for(self) -> tuple[str, ...]:
        """The nnsight generations that it says are to find it loaded; none leaves it to the server."""
        return self.generations or ((self.runtime,) if self.runtime is not None else ())

    @property
    def as_loaded(self) -> DeploymentConfig:
        """What of it a loaded replica cannot change; a task that was not given is not another."""
        return replace(
            self,
            repo_id="",
            task=None,
            replicas=0,
            max_replicas=None,
            dedicated=False,
            runtime=None,
            generations=(),
            padding_factor=0,
            padding_bytes=0,
        )


def task_of(config: Path) -> str | None:
    """The task that a checkpoint's `config.json` names by its architecture, if it can be read."""
    try:
        names = json.loads(config.read_text()).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return None
    for name in names:
        for suffix, task in _TASKS.items():
            if str(name).endswith(suffix):
                return task
    return _FALLBACK_TASK if names else None


def refusal(config: DeploymentConfig, key: ModelKey) -> str | None:
    """Why `key` does not name the model of `config`, said to the client; None where it does."""
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
