"""Readers of complete deployments from a text or a value."""

from __future__ import annotations

from ndif.schema import deployment_file
from ndif.schema.deployment import DeploymentConfig


def read(text: str, source: str) -> tuple[DeploymentConfig, ...]:
    """Return the deployments in YAML or JSON text."""
    return tuple(change.config for change in deployment_file.read(text, source))


def from_value(value: object, source: str) -> tuple[DeploymentConfig, ...]:
    """Return the deployments in a list or mapping."""
    return tuple(change.config for change in deployment_file.changes_from_value(value, source))
