"""Answers of the routes that clients use; `GET /openapi.json` describes them."""

from __future__ import annotations

from typing import Literal

from ndif.schema.answer import answer
from ndif.schema.client_status import ModelStatus
from ndif.schema.job_state import OWN_JOBS, OWN_TRACE, OwnJob, OwnTrace
from ndif.schema.model_key import NEWEST_CLASS
from ndif.schema.states import DeploymentLevel, ReplicaState
from ndif.schema.wires import JOB_ID

MODEL_KEY = (
    "nnsight.modeling.transformers.TransformersModel:"
    '{"repo_id": "openai-community/gpt2", "revision": null, "task": "text-generation"}'
)
OLDER_MODEL_KEY = (
    'nnsight.modeling.language.LanguageModel:{"repo_id": "openai-community/gpt2", "revision": null}'
)
COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
_CONFIG = "3a1c5b8de2f44c0ba6d5d0b0c0c7ed1fe1c9a6de"


@answer(example={"requests": OWN_JOBS})
class OwnJobs:
    """The caller's unfinished jobs, the newest first, and the jobs that ended last."""

    requests: list[OwnJob]


@answer(example={**OWN_TRACE, "error": None, "stored": True})
class OwnTraceAnswer(OwnTrace):
    """The steps of a job of the caller."""

    error: str | None
    """Description of the end of a failed job that was polled for, mostly a traceback; null for others."""
    stored: bool | None
    """True if the job was polled for and its result can be downloaded; null for an ended job while the
    store cannot be reached."""


@answer(example={"cancelled": True, "id": JOB_ID})
class Cancelled:
    """A job that its user has ended."""

    cancelled: Literal[True]
    id: str


@answer(example={"secret": "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD0yYQH7ka4Zs="})
class CallbackSecret:
    """The secret that signs the webhooks of an API key."""

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
"""Placeholder in `/status` of a server without a running model; clients take an empty list for down."""


@answer(
    example={
        "python_version": "3.11.2 (main, Apr 28 2025, 14:11:48) [GCC 12.2.0]",
        "packages": {"nnsight": "0.8.1", "torch": "2.13.0", "transformers": "5.22.2"},
    }
)
class PythonEnvironment:
    """Python and the packages that run blocks."""

    python_version: str
    packages: dict[str, str]
    """Versions by import name."""


@answer(example={"email": "ada@example.org", "tags": ["hotswapping"]})
class Identity:
    """The holder of an API key."""

    email: str | None
    tags: list[str]
    """Rights of the holder: `hotswapping`, `priority`, `trusted`, `gated`; empty for an unknown key."""


@answer(example={"error": "There is no 'vocab.txt' in openai-community/gpt2."})
class HubRefusal:
    """The hub has no such repository, revision or file; `X-Error-Code` says which."""

    error: str


@answer(example={"rfilename": "config.json", "size": 665, "blobId": _CONFIG})
class HubSibling:
    """A file of a repository."""

    rfilename: str
    size: int
    blobId: str  # noqa: N815 - the hub's name


@answer(
    example={
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
class HubModel:
    """A repository, as the Hugging Face Hub describes it."""

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


@answer()
class HubEntry:
    """A file or folder of a repository."""

    type: Literal["file", "directory"]
    path: str
    oid: str
    size: int


HUB_TREE_EXAMPLE = [{"type": "file", "path": "config.json", "oid": _CONFIG, "size": 665}]
