"""The variables as an operator sees them: each with its value, its default, and where it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import AliasChoices, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from ndif.config import Settings, settings

_HIDDEN = "(hidden)"
_SECRETS = re.compile(r"(?<=://)[^/@]*:[^/@]*(?=@)|(?<=/)private-[^/]*|(?<=\?).*")
"""In an address: its service's password, what makes a calendar's address a private one, a signature."""
_WIDTH = 98

_OF_CLIENTS = ("HOST", "API_KEY")
"""What nnsight reads, and a user of this server may well have."""

_ELSEWHERE = {
    "DEV_MODE": "without NDIF_API_KEYS nobody needs a key.",
    "RAY_HEAD_PORT": "the port is a part of NDIF_RAY_ADDRESS.",
    "RAY_DASHBOARD_PORT": "a Ray head that this server starts has no dashboard.",
    "RAY_SERVE_PORT": "this server does without Ray Serve.",
    "CONTROLLER_IMPORT_PATH": "there is one controller.",
}
"""Variables of the specification (section 12.3) for which there is another way here, or no need."""

_HEADER = """\
# Every variable that ndif reads, with its default. Made by `ndif info --env-example`.
# Uncomment what you change, and have it in the server's environment:
#   set -a; . ./.env; set +a; ndif start
"""


class VariableError(ValueError):
    """A variable that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of the environment."""

    name: str
    value: Any
    """As JSON has it; a secret is not shown."""
    default: Any
    source: Literal["default", "environment"]
    meaning: str


def read() -> Settings:
    """The process's settings.

    Raises:
        VariableError: for the first variable that is not valid.
    """
    try:
        return settings()
    except ValidationError as error:
        first = error.errors()[0]
        why = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise VariableError(f"Two variables contradict each other: {why}.") from error
        name = str(first["loc"][0])
        field = Settings.model_fields.get(name)
        variable = _name(name, field) if field is not None else name
        raise VariableError(f"The variable {variable} is not valid: {why}.") from error


def unread(environ: Iterable[str]) -> list[str]:
    """A sentence for each variable that is meant for this server, by its name, and that nothing reads."""
    prefix = str(Settings.model_config["env_prefix"])
    known = [_name(field, info) for field, info in Settings.model_fields.items()]
    read = {*known, *(f"{prefix}{name}" for name in _OF_CLIENTS)}
    # In either case, as they are read.
    return [
        f"The variable {name} is not read: {_why_not(name.upper().removeprefix(prefix), prefix, known)}"
        for name in sorted(environ)
        if name.upper().startswith(prefix) and name.upper() not in read
    ]


def _why_not(name: str, prefix: str, known: Sequence[str]) -> str:
    near = get_close_matches(f"{prefix}{name}", known, 1, cutoff=0.75)
    return _ELSEWHERE.get(name) or (
        f"did you mean {near[0]}?" if near else "`ndif info --config` lists those that are."
    )


def variables(options: Settings) -> list[Variable]:
    """All of them, in the order of their definition."""
    values = options.model_dump(mode="json")
    defaults = Settings.model_construct().model_dump(mode="json")
    return [
        Variable(
            name=_name(field, info),
            value=_shown(info, values[field]),
            default=_shown(info, defaults[field]),
            source="environment" if field in options.model_fields_set else "default",
            meaning=info.description or "",
        )
        for field, info in Settings.model_fields.items()
    ]


def name_of(field: str) -> str:
    """What the variable of a setting is called."""
    return _name(field, Settings.model_fields[field])


def without_secrets(address: str) -> str:
    """An address as it may be shown."""
    return _SECRETS.sub(_HIDDEN, address)


def changed(options: Settings) -> dict[str, Any]:
    """Those that are not as by default, by name, without secrets."""
    return {
        variable.name: variable.value
        for variable in variables(options)
        if variable.value != variable.default and _HIDDEN not in str(variable.value)
    }


def example() -> str:
    """The file `.env.example`."""
    return "\n".join([_HEADER, *_entries(Settings.model_construct())])


def _entries(options: Settings) -> Iterator[str]:
    for variable in variables(options):
        for line in _wrapped(variable.meaning):
            yield f"# {line}"
        yield f"# {variable.name}={_text(variable.default)}\n"


def _wrapped(text: str) -> list[str]:
    from textwrap import wrap

    return wrap(text, _WIDTH, break_on_hyphens=False, break_long_words=False)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(field: str, info: FieldInfo) -> str:
    alias = info.validation_alias
    if isinstance(alias, AliasChoices):
        alias = next((choice for choice in alias.choices if isinstance(choice, str)), None)
    prefix = str(Settings.model_config["env_prefix"])
    return alias if isinstance(alias, str) else f"{prefix}{field}".upper()


def _shown(info: FieldInfo, value: Any) -> Any:
    if value is not None and value != "" and _is_secret(info):
        return _HIDDEN
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return without_secrets(value) if isinstance(value, str) and "://" in value else value


def _is_secret(info: FieldInfo) -> bool:
    return "SecretStr" in repr(info.annotation) or info.annotation is SecretStr
