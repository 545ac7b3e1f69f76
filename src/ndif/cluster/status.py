"""What is told of models and replicas: to clients by `/status`, to operators by `/admin/status`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ndif.cluster.hosted import Hosted, State
from ndif.cluster.level import DeploymentLevel
from ndif.cluster.models import Model
from ndif.schema.variant import Variant

_BEST_FIRST = (State.RUNNING, State.DEPLOYING, State.UNHEALTHY)


def for_clients(models: Iterable[Model], hosted: Sequence[Hosted]) -> dict[str, Any]:
    """What `GET /status` answers, in the form that every client generation reads."""
    entries = {}
    for model in models:
        mine = [each for each in hosted if each.model is model]
        if mine or model.dedicated:
            entries[str(model.config.key)] = _entry(model, mine)
    return {"deployments": entries}


def _entry(model: Model, hosted: Sequence[Hosted]) -> dict[str, Any]:
    key = model.config.key
    generations = sorted({generation_of(each) for each in hosted} | model.problems.keys())
    by_generation = {
        generation: [each for each in hosted if generation_of(each) == generation]
        for generation in generations
    }
    states = {
        generation: _state(mine, has_problem=generation in model.problems)
        for generation, mine in by_generation.items()
    }
    hot = [each for each in hosted if each.deployment.level is DeploymentLevel.HOT]
    warm = bool(hosted) and not hot
    return {
        "model_key": str(key),
        "repo_id": key.repo_id,
        "revision": key.revision,
        "task": key.task,
        "trust_remote_code": model.config.trust_remote_code,
        "deployment_level": (DeploymentLevel.WARM if warm else DeploymentLevel.HOT).value,
        "application_state": _best(states.values()).value,
        "replicas": {
            generation: sum(each.serving for each in mine)
            for generation, mine in by_generation.items()
        },
        "dedicated": model.dedicated,
        "runtimes": {generation: state.value for generation, state in states.items()},
    }


def _state(hosted: Iterable[Hosted], *, has_problem: bool) -> State:
    """What a client of these replicas' generation has."""
    state = _best(each.state for each in hosted)
    return State.UNHEALTHY if has_problem and state is State.NOT_STARTED else state


def _best(states: Iterable[State]) -> State:
    there = set(states)
    return next((state for state in _BEST_FIRST if state in there), State.NOT_STARTED)


def generation_of(hosted: Hosted) -> str:
    """The nnsight generation that a replica is for."""
    return Variant.parse(hosted.deployment.model_key).generation


def replica(hosted: Hosted) -> dict[str, Any]:
    """One replica, for an operator."""
    place = hosted.deployment
    warm = place.level is DeploymentLevel.WARM
    done, total = hosted.progress or (None, None)
    return {
        "replica_id": place.replica_id,
        "node_id": place.node_id,
        "level": place.level.value,
        "state": place.level.value if warm else hosted.state.value,
        "deployed": place.deployed,
        "gpu_mem_bytes_by_id": {str(i): held for i, held in place.gpu_mem_bytes_by_id.items()},
        "on_cpu": place.on_cpu,
        "dedicated": place.dedicated,
        "done": done,
        "total": total,
    }
