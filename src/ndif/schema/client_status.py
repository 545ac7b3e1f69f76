"""The answer of `GET /status`: the models of a server in the form that every client generation reads."""

from __future__ import annotations

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from ndif.schema.answer import JsonObject, answer
from ndif.schema.model_key import A_MODEL
from ndif.schema.server_state import PublicProbe
from ndif.schema.states import DeploymentLevel, ReplicaState

_KEY = str(A_MODEL)
_OPTIONAL = frozenset(("probes", "schedule", "dedicated"))


@answer()
class ScheduledWindow:
    """A time window in which the calendar dedicates a model, in ISO 8601."""

    start: str
    end: str


@answer()
class ModelStatus:
    """A model that the server serves or is to serve."""

    model_key: str
    repo_id: str
    revision: str | None
    task: str | None
    trust_remote_code: bool
    on_demand: bool
    """True if only users requested the model and no operator deployed it."""
    deployment_level: DeploymentLevel
    application_state: str
    """The state in the vocabulary of nnsight 0.6 and 0.7 clients."""
    state: ReplicaState
    replicas: dict[str, int]
    """Number of serving replicas by nnsight generation."""
    runtimes: dict[str, ReplicaState]
    """State by nnsight generation."""
    nodes: list[str]
    """Names of the nodes that hold the model."""
    parameters: int | None
    config: dict[str, Any] | None
    """The model's config; null until it is known."""
    probes: dict[str, PublicProbe] | None = None
    """Results of the server's own probes, by nnsight generation; absent if there are none."""
    schedule: list[ScheduledWindow] | None = None
    dedicated: bool | None = None
    """True if the model is not evicted for other models."""

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        """Leave out optional fields without a value: nnsight 0.7 clients test for their presence."""
        content: JsonObject = handler(self)
        return {
            name: value
            for name, value in content.items()
            if value is not None or name not in _OPTIONAL
        }


@answer(
    example={
        "deployments": {
            _KEY: {
                "model_key": _KEY,
                "repo_id": "openai-community/gpt2",
                "revision": None,
                "task": "text-generation",
                "trust_remote_code": False,
                "on_demand": False,
                "deployment_level": "HOT",
                "application_state": "RUNNING",
                "state": "RUNNING",
                "replicas": {"0.8": 1},
                "runtimes": {"0.8": "RUNNING"},
                "nodes": ["gpu-1"],
                "parameters": 124439808,
                "config": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
                "dedicated": True,
            }
        }
    }
)
class ServerStatus:
    """The models of a server."""

    deployments: dict[str, ModelStatus]
    """Models by key. Further replicas of a model have the suffix `#2`, `#3` and so on."""
