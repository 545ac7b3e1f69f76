"""Answers of the routes that clients use, as models: what `GET /openapi.json` says of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ndif.schema.answer import answer
from ndif.schema.client_status import ModelStatus
from ndif.schema.job_state import OWN_JOBS, OWN_TRACE, OwnJob, OwnTrace
from ndif.schema.model_key import NEWEST_CLASS
from ndif.schema.states import DeploymentLevel, ReplicaState
from ndif.schema.status import Status

JOB_ID = "0d9ff6ea-2f0c-4b1f-8f4e-6c1d5a7b9e21"
"""The job of the examples."""
MODEL_KEY = (
    "nnsight.modeling.transformers.TransformersModel:"
    '{"repo_id": "openai-community/gpt2", "revision": null, "task": "text-generation"}'
)
OLDER_MODEL_KEY = (
    'nnsight.modeling.language.LanguageModel:{"repo_id": "openai-community/gpt2", "revision": null}'
)
COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
_CONFIG = "3a1c5b8de2f44c0ba6d5d0b0c0c7ed1fe1c9a6de"


def _with(*examples: Any) -> ConfigDict:
    return ConfigDict(
        extra="forbid",
        protected_namespaces=(),
        use_attribute_docstrings=True,
        json_schema_extra={"examples": list(examples)},
    )


class JobUpdate(BaseModel):
    """A job's state."""

    model_config = _with(
        {"id": JOB_ID, "status": "RECEIVED", "description": "Your job has been received."}
    )

    id: str
    """The job's id."""
    status: Status
    description: str
    """A sentence on the state: a position in the queue, or the error of a job that failed."""
    data: str | tuple[str, int] | None = None
    """With COMPLETED, the address of the result, which is signed and expires; for clients of 0.6 and 0.7
    followed by its size in bytes."""
    meta: dict[str, Any] | None = None
    """With COMPLETED, what the run cost: `execution_time` in seconds, `peak_memory` in bytes."""


class OwnJobs(BaseModel):
    """The caller's unfinished jobs, the newest first, and those that ended last."""

    model_config = _with({"requests": OWN_JOBS})

    requests: list[OwnJob]


@answer(example={**OWN_TRACE, "error": None, "stored": True})
class OwnTraceAnswer(OwnTrace):
    """The steps of a job of the caller."""

    error: str | None
    """Description of the end of a failed job that was polled for, mostly a traceback; null for others."""
    stored: bool | None
    """True if the job was polled for and its result can be downloaded; null for an ended job while the
    store cannot be reached."""


class Cancelled(BaseModel):
    """A job that its user has ended."""

    model_config = _with({"cancelled": True, "id": JOB_ID})

    cancelled: Literal[True]
    id: str


class CallbackSecret(BaseModel):
    """The secret that signs the call-backs of an API key."""

    model_config = _with({"secret": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD0yYQH7ka4Zs="})

    secret: str
    """Secret in the form of Standard Webhooks: `whsec_` and Base64."""


READY = ModelStatus(
    model_key=f'{NEWEST_CLASS}:{{"repo_id": "Ready: loads on request", "revision": null}}',
    repo_id="Ready: loads on request",
    revision=None,
    task=None,
    trust_remote_code=False,
    on_demand=True,
    deployment_level=DeploymentLevel.HOT,
    application_state=ReplicaState.RUNNING.for_clients,
    state=ReplicaState.RUNNING,
    replicas={},
    runtimes={},
    nodes=[],
    parameters=None,
    config=None,
    dedicated=False,
)
"""The line of a server that would load a model now: clients take one without a model that runs for down."""


class PythonEnvironment(BaseModel):
    """Python and the packages that run blocks."""

    model_config = _with(
        {
            "python_version": "3.11.2 (main, Apr 28 2025, 14:11:48) [GCC 12.2.0]",
            "packages": {"nnsight": "0.8.1", "torch": "2.13.0", "transformers": "5.22.2"},
        }
    )

    python_version: str
    packages: dict[str, str]
    """Versions by import name."""


class Identity(BaseModel):
    """The holder of an API key."""

    model_config = _with({"email": "ada@example.org", "tags": ["hotswapping"]})

    email: str | None
    tags: list[str]
    """Rights of the holder: `hotswapping`, `priority`, `trusted`, `gated`; none of an unknown key."""


class HubRefusal(BaseModel):
    """The hub has no such repository, revision or file; `X-Error-Code` says which."""

    model_config = _with(
        {"error": "There is no 'vocab.txt' in openai-community/gpt2."},
    )

    error: str


class HubSibling(BaseModel):
    """A file of a repository."""

    model_config = _with({"rfilename": "config.json", "size": 665, "blobId": _CONFIG})

    rfilename: str
    size: int
    blobId: str  # noqa: N815 - the hub's name


class HubModel(BaseModel):
    """A repository, as the Hugging Face Hub describes it."""

    model_config = _with(
        {
            "id": "openai-community/gpt2",
            "modelId": "openai-community/gpt2",
            "sha": COMMIT,
            "pipeline_tag": "text-generation",
            "tags": ["transformers", "text-generation"],
            "library_name": "transformers",
            "private": False,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": "config.json", "size": 665, "blobId": _CONFIG}],
        }
    )

    id: str
    modelId: str  # noqa: N815 - the hub's name
    sha: str
    pipeline_tag: str | None
    tags: list[str]
    library_name: str
    private: bool
    gated: bool
    disabled: bool
    downloads: int
    likes: int
    siblings: list[HubSibling]


HUB_TREE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "type": {"enum": ["file", "directory"]},
            "path": {"type": "string"},
            "oid": {"type": "string"},
            "size": {"type": "integer"},
        },
        "required": ["type", "path", "oid", "size"],
        "additionalProperties": False,
    },
}
"""Schema of a listing of files."""
HUB_TREE_EXAMPLE = [{"type": "file", "path": "config.json", "oid": _CONFIG, "size": 665}]
