"""Users, keys and tiers, as operators see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ndif.schema.answer import JsonObject, answer
from ndif.schema.limits import KeyLimits

_SOME_TIME = 1_785_000_000.0
_KEY: JsonObject = {
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
_TIER: JsonObject = {
    "name": "lab",
    "hotswapping": True,
    "priority": False,
    "trusted": False,
    "gated": False,
    "weight": 2.0,
    "limits": {"requests_per_minute": 60},
    "keys": 1,
}
_USER: JsonObject = {
    "name": "ada@example.org",
    "created": _SOME_TIME,
    "keys": 1,
    "last_used": None,
}


@answer(example=_KEY)
class ApiKey:
    """An API key without its secret. Times are Unix seconds."""

    id: str
    """Public id of the key. It does not authenticate."""
    user: str | None
    name: str
    """Label of the key."""
    state: Literal["VALID", "EXPIRED", "REVOKED"]
    tiers: list[str]
    created: float
    expires: float | None
    """Null if the key does not expire."""
    last_used: float | None
    revoked: float | None
    account: str
    """Digest under which the server counts the key's jobs. It does not reveal the key."""


@answer(example={**_KEY, "state": "REVOKED", "revoked": _SOME_TIME, "killed": 2})
class RevokedApiKey(ApiKey):
    """A revoked key and the number of its jobs that were ended."""

    killed: int
    """Number of the key's waiting or running jobs that were ended."""


@answer(example={**_KEY, "api_key": "ndif_6f1SxjN2bqJd0o3cT9aKp7u8vXyZ4wRm5eLhQgUiWsA"})
class NewApiKey(ApiKey):
    """A new key. No other answer contains the key's secret."""

    api_key: str = field(repr=False)
    """The secret key."""


@answer(example={"keys": [_KEY]})
class ApiKeys:
    """Keys, oldest first."""

    keys: list[ApiKey]


@answer(example={"imported": 3, "known": 1})
class ImportedKeys:
    """The result of an import of keys."""

    imported: int
    """Number of keys that were added."""
    known: int
    """Number of keys that already existed and stay unchanged."""


RIGHTS = ("hotswapping", "priority", "trusted", "gated")
"""Names of the rights that a tier can grant."""


class _AsLimits:
    """An annotation that documents the schema of `Limits` in OpenAPI without validating values.

    Another server may have written invalid limits into the database.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, _: value,
            handler.generate_schema(KeyLimits),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )


@answer()
class Tier:
    """A named set of rights and limits. A key may have several tiers."""

    name: str
    hotswapping: bool
    """True if models are loaded on demand for the tier's keys."""
    priority: bool
    """True if requests of the tier's keys are served before others of their age."""
    trusted: bool
    """True if code of the tier's keys runs unconfined."""
    gated: bool
    """True if the tier's keys may load gated models, which the hub gives only to the operator's account."""
    weight: float
    """Share of a model relative to other users."""
    limits: Annotated[Mapping[str, Any], _AsLimits] | None = field(hash=False)
    """Limits that override the server's, by name; null for none."""

    @property
    def rights(self) -> list[str]:
        """Return the names of the rights that the tier grants."""
        return [right for right in RIGHTS if getattr(self, right)]


@answer(example=_TIER)
class AccountTier(Tier):
    """A tier and the number of its keys."""

    keys: int
    """Number of keys that have the tier."""


@answer(example={"tiers": [_TIER]})
class AccountTiers:
    """Tiers in the order of their names."""

    tiers: list[AccountTier]


@answer(example={"deleted": "lab"})
class DeletedTier:
    """The name of a deleted tier."""

    deleted: str
    """Name of the deleted tier."""


@answer(example=_USER)
class AccountUser:
    """A user and the number of their keys. Times are Unix seconds."""

    name: str
    created: float
    keys: int
    """Number of the user's keys."""
    last_used: float | None
    """Unix time of the last use of any of the user's keys; null if none was used."""


@answer(example={"users": [_USER]})
class AccountUsers:
    """Users in the order of their names."""

    users: list[AccountUser]


@answer(example={**_USER, "keys": [_KEY]})
class UserWithKeys:
    """A user and their keys. Times are Unix seconds."""

    name: str
    created: float
    keys: list[ApiKey]
    last_used: float | None
