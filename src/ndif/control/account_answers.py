"""Answers of operations on users, keys and tiers, as models: what `GET /openapi.json` says of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ndif.schema.limits import Limits

_SOME_TIME = 1_785_000_000.0
_KEY: dict[str, Any] = {
    "id": "9b1f0c62d7aa",
    "user": "ada@example.org",
    "name": "notebook",
    "state": "VALID",
    "tiers": ["lab"],
    "created": _SOME_TIME,
    "expires": _SOME_TIME + 30 * 86_400,
    "last_used": None,
    "revoked": None,
    "account": "5f1c0a9d3e7b46820c9d1e2f3a4b5c6d",
}
_TIER: dict[str, Any] = {
    "name": "lab",
    "hotswapping": True,
    "priority": False,
    "trusted": False,
    "gated": False,
    "weight": 2.0,
    "limits": {"requests_per_minute": 60},
    "keys": 1,
}
_USER: dict[str, Any] = {
    "name": "ada@example.org",
    "created": _SOME_TIME,
    "keys": 1,
    "last_used": None,
}


def _with(example: Any) -> ConfigDict:
    return ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra={"examples": [example]},
    )


class ApiKey(BaseModel):
    """A key, without the key itself; moments are Unix seconds."""

    model_config = _with(_KEY)

    id: str
    """Name of the key for operators, which lets nobody in."""
    user: str | None
    name: str
    """The key's label."""
    state: Literal["VALID", "EXPIRED", "REVOKED"]
    tiers: list[str]
    created: float
    expires: float | None
    """Null: the key does not expire."""
    last_used: float | None
    revoked: float | None
    account: str
    """Digest under which the server counts the key's jobs; it leads back to no key."""


class RevokedApiKey(ApiKey):
    """A key that is revoked, and what came of its jobs."""

    model_config = _with({**_KEY, "state": "REVOKED", "revoked": _SOME_TIME, "killed": 2})

    killed: int
    """Number of its jobs that waited or ran, and are ended."""


class NewApiKey(ApiKey):
    """A new key, which no other answer shows."""

    model_config = _with({**_KEY, "api_key": "ndif_6f1SxjN2bqJd0o3cT9aKp7u8vXyZ4wRm5eLhQgUiWsA"})

    api_key: str
    """The key itself."""


class ApiKeys(BaseModel):
    """Keys, the oldest first."""

    model_config = _with({"keys": [_KEY]})

    keys: list[ApiKey]


class ImportedKeys(BaseModel):
    """Numbers of keys."""

    model_config = _with({"imported": 3, "known": 1})

    imported: int
    """Keys that are new."""
    known: int
    """Keys that were there, and stay as they are."""


class AccountTier(BaseModel):
    """A tier."""

    model_config = _with(_TIER)

    name: str
    hotswapping: bool
    """Models are loaded on demand for the tier's keys."""
    priority: bool
    """Requests of the tier's keys are served before others of their age."""
    trusted: bool
    """Code of the tier's keys runs unconfined."""
    gated: bool
    """Models that the hub gives to the operator's account alone are loaded for the tier's keys."""
    weight: float
    """Share of a model beside other users."""
    limits: Limits | None
    """Limits that differ from the server's; null: none does."""
    keys: int
    """Number of the tier's keys."""


class AccountTiers(BaseModel):
    """Tiers by name."""

    model_config = _with({"tiers": [_TIER]})

    tiers: list[AccountTier]


class DeletedTier(BaseModel):
    """A tier that is gone."""

    model_config = _with({"deleted": "lab"})

    deleted: str
    """Name of the tier."""


class AccountUser(BaseModel):
    """A user."""

    model_config = _with(_USER)

    name: str
    created: float
    keys: int
    """Number of the user's keys."""
    last_used: float | None
    """Unix time at which one of the keys was used last."""


class AccountUsers(BaseModel):
    """Users by name."""

    model_config = _with({"users": [_USER]})

    users: list[AccountUser]


class UserWithKeys(BaseModel):
    """A user and their keys."""

    model_config = _with({**_USER, "keys": [_KEY]})

    name: str
    created: float
    last_used: float | None
    keys: list[ApiKey]
