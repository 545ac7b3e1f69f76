"""Models as one process publishes them to another: what admits a request, and the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ndif.cluster.models import Model, Models
from ndif.cluster.replica import Replica
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey


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
