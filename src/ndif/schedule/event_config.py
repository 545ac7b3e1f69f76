"""The model that an event asks for, and its settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from typing import Any

import yaml

from ndif.errors import quoted
from ndif.schedule.expansion import CalendarEvent
from ndif.schema.deployment import DeploymentConfig, explain_mismatch
from ndif.schema.deployment_settings import (
    SettingsError,
    closest_setting,
    parse_deployment,
    parse_model,
)

_RESERVED = {
    "dedicated": "every model in the schedule is dedicated",
    "checkpoint": "a calendar may not say where weights come from",
    "trust_remote_code": "a calendar may not have code run",
}
"""Settings that an event may not give, with reasons: the author of an event may not be an operator."""

_MAX_LENGTH = 4_000
_MAX_BRACKETS = 50
"""The time to read YAML grows with the square of its nesting."""

_MAX_NAMES = 20
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HTML = re.compile(r"<(br|p|div|span|html-blob|ul|ol|li|b|i|u|a)\b", re.IGNORECASE)
_BREAK = re.compile(r"<(br|/?p|/?div|/?li|/?ul|/?ol|/?html-blob)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z][^<>]*>", re.IGNORECASE)
_FIELD = re.compile(r"""^\s*["']?([A-Za-z_]+)["']?\s*:(?=\s|$)""", re.MULTILINE)
_CONFERENCE = re.compile(r"^-::~.*", re.MULTILINE | re.DOTALL)
"""The text that Google adds below the description of an event with a video call."""


class EventConfigError(ValueError):
    """The event names no deployable model; the message completes a sentence about the event."""


def config_for(event: CalendarEvent, deployments: Sequence[DeploymentConfig]) -> DeploymentConfig:
    """Return the deployment that an event asks for, with missing settings from `deployments`."""
    fields = _fields(event.description)
    repo_id = fields.pop("repo_id", None)
    if repo_id is not None and not isinstance(repo_id, str):
        raise EventConfigError(f"has a repo_id that is no text: {quoted(repo_id)}")
    if fields.get("dedicated") is True:
        del fields["dedicated"]
    name = (repo_id or event.summary).strip()
    for field, reason in _RESERVED.items():
        if field in fields:
            raise EventConfigError(f"gives {field}, but {reason}")
    base = _base(name, deployments)
    if base is None and repo_id is None and not re.search(r"[/{]", name):
        raise EventConfigError("names no model: call it by a repo id, like openai-community/gpt2")
    try:
        return replace(parse_deployment(name, fields, base), dedicated=True)
    except SettingsError as error:
        raise EventConfigError(f"cannot be used: {str(error).removesuffix('.')}") from error


def _base(name: str, deployments: Sequence[DeploymentConfig]) -> DeploymentConfig | None:
    """Return the server's deployment with that name, or None."""
    try:
        key = parse_model(name)
    except ValueError:
        return None
    if "{" in name:
        return next(
            (deployment for deployment in deployments if explain_mismatch(deployment, key) is None),
            None,
        )
    # A bare name matches a model at any revision, and first of all one without a revision.
    named = [deployment for deployment in deployments if deployment.repo_id.lower() == name.lower()]
    return min(named, key=lambda deployment: deployment.revision is not None, default=None)


def _fields(description: str) -> dict[str, Any]:
    """Return the settings in a description; {} if it is only prose."""
    text = _plain(description)
    names = _FIELD.findall(text)
    if not text.startswith("{") and not any(name == closest_setting(name) for name in names):
        # No setting is spelt correctly, so the text is prose, unless every line looks like a setting.
        lines = [line for line in text.splitlines() if line.strip()]
        if len(names) != len(lines) or not any(
            closest_setting(name) for name in names[:_MAX_NAMES]
        ):
            return {}
    if len(text) > _MAX_LENGTH or sum(map(text.count, "[{")) > _MAX_BRACKETS:
        raise EventConfigError(
            "has settings in its description that are too long or too deeply nested"
        )
    try:
        has_aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader))
        fields = None if has_aliases else yaml.load(text, _Loader)  # noqa: S506 - it is a safe one
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = getattr(error, "problem", error)
        raise EventConfigError(
            f"has settings in its description that are no YAML: {problem}"
        ) from error
    if not isinstance(fields, Mapping):
        raise EventConfigError("has settings in its description that are no plain mapping")
    return {str(name): value for name, value in fields.items()}


def _plain(description: str) -> str:
    """Return a description without the markup that calendar editors add."""
    text = description
    if _HTML.search(text):
        # No HTML parser, because it would be slow on text that is not HTML.
        text = unescape(_TAG.sub("", _BREAK.sub("\n", text)))
    return _CONFERENCE.sub("", text.replace("\xa0", " ")).strip()
