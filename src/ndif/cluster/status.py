"""Models and replicas as clients and operators see them, and as a leader publishes them to gateways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ndif.cluster.models import Model, Models
from ndif.cluster.replica import Replica, ReplicaState
from ndif.placement.replica import DeploymentLevel
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey

_BEST_FIRST = (ReplicaState.RUNNING, ReplicaState.DEPLOYING, ReplicaState.UNHEALTHY)


def client_status(models: Iterable[Model], replicas: Sequence[Replica]) -> dict[str, Any]:
    """Return the answer of `GET /status`, in the form that every client generation reads."""
    entries = {}
    for model in models:
        mine = [each for each in replicas if each.model is model]
        if mine or model.dedicated:
            entries[str(model.config.key)] = _entry(model, mine)
    return {"deployments": entries}


def _entry(model: Model, replicas: Sequence[Replica]) -> dict[str, Any]:
    key = model.config.key
    serving, states = {}, {}
    for generation in sorted({each.generation for each in replicas} | model.problems.keys()):
        mine = [each for each in replicas if each.generation == generation]
        serving[generation] = sum(each.serving for each in mine)
        states[generation] = _state(mine, has_problem=generation in model.problems)
    hot = [each for each in replicas if each.placed.level is DeploymentLevel.HOT]
    warm = bool(replicas) and not hot
    return {
        "model_key": str(key),
        "repo_id": key.repo_id,
        "revision": key.revision,
        "task": key.task,
        "trust_remote_code": model.config.trust_remote_code,
        "deployment_level": (DeploymentLevel.WARM if warm else DeploymentLevel.HOT).value,
        "application_state": _best(states.values()).value,
        "replicas": serving,
        "dedicated": model.dedicated,
        "runtimes": {generation: state.value for generation, state in states.items()},
    }


def _state(replicas: Iterable[Replica], *, has_problem: bool) -> ReplicaState:
    """Return the state that clients of these replicas' generation see."""
    state = _best(each.state for each in replicas)
    return ReplicaState.UNHEALTHY if has_problem and state is ReplicaState.NOT_STARTED else state


def _best(states: Iterable[ReplicaState]) -> ReplicaState:
    there = set(states)
    return next((state for state in _BEST_FIRST if state in there), ReplicaState.NOT_STARTED)


def describe_replica(replica: Replica) -> dict[str, Any]:
    """Return one replica for an operator, as a JSON-serialisable dict."""
    place = replica.placed
    warm = place.level is DeploymentLevel.WARM
    done, total = replica.progress or (None, None)
    return {
        "replica_id": place.replica_id,
        "node_id": place.node_id,
        "level": place.level.value,
        "state": place.level.value if warm else replica.state.value,
        "deployed": place.deployed,
        "gpu_mem_bytes_by_id": {str(i): held for i, held in place.gpu_mem_bytes_by_id.items()},
        "on_cpu": place.on_cpu,
        "dedicated": place.dedicated,
        "done": done,
        "total": total,
    }


def describe(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Return models as JSON-serialisable dicts; `read` is the inverse."""
    return [
        {
            "key": str(model.key),
            "config": asdict(model.config),
            "aliases": sorted(model.aliases),
            "on_demand": model.on_demand,
            "booked": None if model.scheduled is None else asdict(model.scheduled),
        }
        for model in models
    ]


def read(described: Sequence[Mapping[str, Any]]) -> Models:
    """Return the models that `describe` was given."""
    models = Models()
    for one in described:
        booked = one["booked"]
        models.add(
            Model(
                ModelKey.parse(one["key"]),
                DeploymentConfig(**one["config"]),
                one["on_demand"],
                None if booked is None else DeploymentConfig(**booked),
                aliases=set(one["aliases"]),
            )
        )
    return models


def files(replica: Iterable[Replica]) -> dict[str, dict[str, Any]]:
    """Return the files that clients build models from (`ModelActor.model`), JSON-serialisable."""
    return {
        each.model.config.repo_id: {
            "files": each.actor.model["files"],
            "revision": each.model.config.revision,
            "task": each.model.config.task,
        }
        for each in replica
        if each.is_up and each.provides_files and "files" in each.actor.model
    }
