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
    """A key, without the key itself; moments are Unix seconds."""

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


@answer(example={**_KEY, "state": "REVOKED", "revoked": _SOME_TIME, "killed": 2})
class RevokedApiKey(ApiKey):
    """A key that is revoked, and what came of its jobs."""

    killed: int
    """Number of its jobs that waited or ran, and are ended."""


@answer(example={**_KEY, "api_key": "ndif_6f1SxjN2bqJd0o3cT9aKp7u8vXyZ4wRm5eLhQgUiWsA"})
class NewApiKey(ApiKey):
    """A new key, which no other answer shows."""

    api_key: str = field(repr=False)
    """The key itself."""


@answer(example={"keys": [_KEY]})
class ApiKeys:
    """Keys, the oldest first."""

    keys: list[ApiKey]


@answer(example={"imported": 3, "known": 1})
class ImportedKeys:
    """Numbers of keys."""

    imported: int
    """Keys that are new."""
    known: int
    """Keys that were there, and stay as they are."""


RIGHTS = ("hotswapping", "priority", "trusted", "gated")
"""Names of the rights that a tier gives."""


class _AsLimits:
    """Limits for the document alone: what another server has written into a database is not validated."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, _: value,
            handler.generate_schema(KeyLimits),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )


@answer()
class Tier:
    """A name for what a key may do; a key may have several."""

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
    limits: Annotated[Mapping[str, Any], _AsLimits] | None = field(hash=False)
    """Limits that differ from the server's; null: none does."""

    @property
    def rights(self) -> list[str]:
        """Return the names of the rights that it gives."""
        return [right for right in RIGHTS if getattr(self, right)]


@answer(example=_TIER)
class AccountTier(Tier):
    """A tier."""

    keys: int
    """Number of the tier's keys."""


@answer(example={"tiers": [_TIER]})
class AccountTiers:
    """Tiers by name."""

    tiers: list[AccountTier]


@answer(example={"deleted": "lab"})
class DeletedTier:
    """A tier that is gone."""

    deleted: str
    """Name of the tier."""


@answer(example=_USER)
class AccountUser:
    """A user."""

    name: str
    created: float
    keys: int
    """Number of the user's keys."""
    last_used: float | None
    """Unix time at which one of the keys was used last."""


@answer(example={"users": [_USER]})
class AccountUsers:
    """Users by name."""

    users: list[AccountUser]


@answer(example={**_USER, "keys": [_KEY]})
class UserWithKeys:
    """A user and their keys."""

    name: str
    created: float
    keys: list[ApiKey]
    last_used: float | None
