"""A deployment as an entry of a deployment file: what reads it back is the same deployment."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ndif.schema.deployment import DeploymentConfig

_NAMES = {"execution_timeout_s": "execution_timeout_seconds"}
_DEFAULTS = DeploymentConfig("", "")


def entry_of(config: DeploymentConfig) -> dict[str, Any]:
    """The model's repo id, and the settings that are not as they would be without a word."""
    entry: dict[str, Any] = {"repo_id": config.repo_id}
    for field in fields(config):
        value = getattr(config, field.name)
        default = (
            config.repo_id if field.name == "checkpoint" else getattr(_DEFAULTS, field.name, None)
        )
        if field.name != "repo_id" and value != default:
            entry[_NAMES.get(field.name, field.name)] = (
                list(value) if isinstance(value, tuple) else value
            )
    return entry
