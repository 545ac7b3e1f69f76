"""Models as one process tells another of them: what is needed to admit a request, and their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ndif.cluster.hosted import Hosted
from ndif.cluster.models import Model, Models
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey


def describe(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Models, for JSON."""
    return [
        {
            "key": str(model.key),
            "config": asdict(model.config),
            "aliases": sorted(model.aliases),
            "on_demand": model.on_demand,
            "booked": None if model.booked is None else asdict(model.booked),
        }
        for model in models
    ]


def read(described: Sequence[Mapping[str, Any]]) -> Models:
    """What `describe` was given."""
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


def files(hosted: Iterable[Hosted]) -> dict[str, dict[str, Any]]:
    """Where the files are, for JSON, that clients build models from (`Actor.model`)."""
    return {
        each.model.config.repo_id: {
            "files": each.actor.model["files"],
            "revision": each.model.config.revision,
            "task": each.model.config.task,
        }
        for each in hosted
        if each.is_up and each.speaks_for_model and "files" in each.actor.model
    }
