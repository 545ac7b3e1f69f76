"""Which model an event asks for, and with which settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import unescape
from typing import Any

import yaml

from ndif.cluster.calendar.events import Event, EventError
from ndif.schema.deployment import DeploymentConfig, refusal
from ndif.schema.deployment_settings import SettingsError, config_of, key_of, nearest, quoted

_RESERVED = {
    "dedicated": "what is in the schedule is dedicated",
    "checkpoint": "a calendar may not say where weights come from",
    "trust_remote_code": "a calendar may not have code run",
}
"""Settings that an event may not give, and why: who writes events need not be who runs the server."""

_LONGEST = 4_000
_MOST_BRACKETS = 50
"""Reading YAML takes the square of how deep it nests."""

_MOST_NAMES = 20
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HTML = re.compile(r"<(br|p|div|span|html-blob|ul|ol|li|b|i|u|a)\b", re.IGNORECASE)
_BREAK = re.compile(r"<(br|/?p|/?div|/?li|/?ul|/?ol|/?html-blob)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-z][^<>]*>", re.IGNORECASE)
_FIELD = re.compile(r"""^\s*["']?([A-Za-z_]+)["']?\s*:(?=\s|$)""", re.MULTILINE)
_CONFERENCE = re.compile(r"^-::~.*", re.MULTILINE | re.DOTALL)
"""What Google adds below a description where an event has a video call."""


def config_for(event: Event, deployments: Sequence[DeploymentConfig]) -> DeploymentConfig:
    """The deployment that an event asks for; settings that it does not give are those of `deployments`.

    Raises:
        EventError: if it names no model, or settings that there are not.
    """
    fields = _fields(event.description)
    given = fields.pop("repo_id", None)
    if given is not None and not isinstance(given, str):
        raise EventError(f"has a repo_id that is no text: {quoted(given)}")
    if fields.get("dedicated") is True:
        del fields["dedicated"]
    name = (given or event.summary).strip()
    for field, why in _RESERVED.items():
        if field in fields:
            raise EventError(f"gives {field}, but {why}")
    base = _base(name, deployments)
    if base is None and given is None and not re.search(r"[/{]", name):
        raise EventError("names no model: call it by a repo id, like openai-community/gpt2")
    try:
        return replace(config_of(name, fields, base), dedicated=True)
    except SettingsError as error:
        raise EventError(f"cannot be used: {str(error).removesuffix('.')}") from error


def _base(name: str, deployments: Sequence[DeploymentConfig]) -> DeploymentConfig | None:
    """The deployment that the server knows by that name."""
    try:
        key = key_of(name)
    except ValueError:
        return None
    if "{" in name:
        return next((each for each in deployments if refusal(each, key) is None), None)
    # A bare name means a model at any revision, and first of all at none in particular.
    known = [each for each in deployments if each.repo_id.lower() == name.lower()]
    return min(known, key=lambda each: each.revision is not None, default=None)


def _fields(description: str) -> dict[str, Any]:
    """The settings in a description; none in one that is only prose."""
    text = _plain(description)
    names = _FIELD.findall(text)
    if not text.startswith("{") and not any(name == nearest(name) for name in names):
        # No setting is spelt right: prose, unless the whole of it reads like settings.
        lines = [line for line in text.splitlines() if line.strip()]
        if len(names) != len(lines) or not any(nearest(name) for name in names[:_MOST_NAMES]):
            return {}
    if len(text) > _LONGEST or sum(map(text.count, "[{")) > _MOST_BRACKETS:
        raise EventError("has settings in its description, but too much of them")
    try:
        aliases = any(isinstance(each, yaml.AliasEvent) for each in yaml.parse(text, _Loader))
        fields = None if aliases else yaml.load(text, _Loader)  # noqa: S506 - it is a safe one
    except yaml.MarkedYAMLError as error:
        why = f"has settings in its description that are no YAML: {error.problem}"
        raise EventError(why) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise EventError(f"has settings in its description that are no YAML: {error}") from error
    if not isinstance(fields, Mapping):
        raise EventError("has settings in its description that are no plain mapping")
    return {str(name): value for name, value in fields.items()}


def _plain(description: str) -> str:
    """A description without the marks that calendars' editors put into it."""
    text = description
    if _HTML.search(text):
        # Not by an HTML parser, which takes long over what is none.
        text = unescape(_TAG.sub("", _BREAK.sub("\n", text)))
    return _CONFERENCE.sub("", text.replace("\xa0", " ")).strip()
