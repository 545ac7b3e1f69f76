"""Models as one process tells another what it serves: all that is needed to admit a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

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
