"""Operations on users, keys and tiers, each with the fields of its `/admin` route.

They act on the database of keys, so they also work without a running server. An operation that also needs
the leader has a `next_operation`, which the leader performs.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    WithJsonSchema,
)

from ndif.control.answers import KilledJobs
from ndif.control.operations import Body, Command, KillKey, Operation, with_example
from ndif.errors import problems
from ndif.schema import account as answers
from ndif.schema.answer import project
from ndif.schema.deployment import OperationError
from ndif.schema.limits import KeyLimits
from ndif.stores.accounts import (
    ImportedKey,
    KeysError,
    NotInRegistryError,
    Registry,
    RegistryError,
)

_LINE = r"^[^\x00-\x1f\x7f]*$"
_Text = Annotated[str, Field(max_length=200, pattern=_LINE)]
_User = Annotated[str, Field(min_length=1, max_length=320, pattern=_LINE)]
_TierName = Annotated[str, Field(min_length=1, max_length=64, pattern=_LINE)]
_Weight = Annotated[float, Field(gt=0, le=1000)]


def _check_limits(own: dict[str, Any]) -> dict[str, Any]:
    """Return limits as numbers; raise a ValueError that names an invalid one."""
    try:
        return KeyLimits.model_validate(own).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = problems(error)[0]
        hint = f"; there are {', '.join(KeyLimits.model_fields)}" if first.is_unknown else ""
        raise ValueError(f"{first.place}: {first.reason}{hint}") from error


_Limits = Annotated[
    dict[str, Any], AfterValidator(_check_limits), WithJsonSchema(KeyLimits.model_json_schema())
]
"""Limits that differ from the server's limits, by name; null if no limit differs."""
_MAX_EXPIRY_S = 100 * 366 * 86_400
"""Maximum seconds until a key expires, so that its expiry is a valid date."""


_USER, _KEY, _TIER = "ada@example.org", "9b1f0c62d7aa", "lab"
"""Names in the examples."""


class AccountOperation(Command):
    """A command on users, keys or tiers; the fields of a read-only one are query parameters."""

    async def perform(self, registry: Registry) -> Any:
        """Perform the operation and return its answer; raise a RegistryError if it fails."""
        raise NotImplementedError

    def next_operation(self, answer: Any) -> Operation | None:
        """Return the operation that the leader must perform afterwards; None for none."""
        return None

    def after_next_operation(self, answer: Any, _: Any) -> Any:
        """Return the answer, completed with the answer of the next operation."""
        return answer


class ListKeys(AccountOperation):
    """All API keys, or the keys of one user."""

    model_config = with_example({"user": _USER})
    name, method = "keys", "GET"

    user: _User | None = None
    """Only the keys of this user; None: of all users."""

    async def perform(self, registry: Registry) -> answers.ApiKeys:
        return answers.ApiKeys(keys=await registry.keys(self.user))


class ShowKey(AccountOperation):
    """One API key."""

    model_config = with_example({"key": _KEY})
    name, method = "keys/show", "GET"

    key: _Text
    """Id of the key, or its beginning."""

    async def perform(self, registry: Registry) -> answers.ApiKey:
        return await registry.key(self.key)


class CreateKey(AccountOperation):
    """Create an API key; no later answer contains the key itself."""

    model_config = with_example(
        {"user": _USER, "label": "notebook", "expires_in_s": 30 * 86_400, "tiers": [_TIER]}
    )
    name = "keys/create"

    user: _User | None = None
    """Name of the key's user; a new name adds a user."""
    label: _Text = ""
    """Label that distinguishes the key from other keys of the user."""
    expires_in_s: Annotated[float, Field(gt=0, le=_MAX_EXPIRY_S, allow_inf_nan=False)] | None = None
    """Seconds until the key expires; None: never."""
    tiers: list[_TierName] = Field(default=[])

    async def perform(self, registry: Registry) -> answers.NewApiKey:
        expires = None if self.expires_in_s is None else time.time() + self.expires_in_s
        return await registry.create_key(self.user, self.label, expires, self.tiers)


class RevokeKey(AccountOperation):
    """Revoke an API key permanently and cancel its jobs."""

    model_config = with_example({"key": _KEY})
    name = "keys/revoke"

    key: _Text
    """Id of the key, or its beginning."""

    async def perform(self, registry: Registry) -> answers.RevokedApiKey:
        return project(answers.RevokedApiKey, await registry.revoke(self.key), killed=0)

    def next_operation(self, answer: answers.RevokedApiKey) -> Operation:
        return KillKey(account=answer.account, revoked=True)

    def after_next_operation(
        self, answer: answers.RevokedApiKey, ended: KilledJobs
    ) -> answers.RevokedApiKey:
        return replace(answer, killed=ended.killed)


class TierFields(Body):
    """A tier's name and properties."""

    tier: _TierName
    hotswapping: bool = False
    priority: bool = False
    trusted: bool = False
    gated: bool = False
    weight: _Weight = 1.0
    limits: _Limits | None = None

    def made(self) -> answers.Tier:
        """Return the tier."""
        return answers.Tier(name=self.tier, **self.model_dump(exclude={"tier"}))


class KeyFields(Body):
    """An API key that another system created."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    user: _User | None = None
    tier: TierFields | None = None


class ImportKeys(AccountOperation):
    """Import API keys by their SHA-256 digests."""

    model_config = with_example(
        {
            "keys": [
                {
                    "sha256": "9f86d081884c7d659a2feaa0c55ad015" * 2,
                    "user": _USER,
                    "tier": {"tier": _TIER},
                }
            ]
        }
    )
    name = "keys/import"

    keys: list[KeyFields]

    async def perform(self, registry: Registry) -> answers.ImportedKeys:
        return await registry.import_keys(
            ImportedKey(key.sha256, key.user, (key.tier.made(),) if key.tier else ())
            for key in self.keys
        )


class MigrateKeys(AccountOperation):
    """Copy the API keys from another NDIF server's tables in the same database."""

    name = "keys/migrate"

    async def perform(self, registry: Registry) -> answers.ImportedKeys:
        return await registry.copy_foreign()


class ListTiers(AccountOperation):
    """All tiers."""

    name, method = "tiers", "GET"

    async def perform(self, registry: Registry) -> answers.AccountTiers:
        return answers.AccountTiers(tiers=await registry.tiers())


class CreateTier(TierFields, AccountOperation):
    """Create a tier."""

    model_config = with_example(
        {"tier": _TIER, "hotswapping": True, "weight": 2.0, "limits": {"requests_per_minute": 60}}
    )
    name = "tiers/create"

    async def perform(self, registry: Registry) -> answers.AccountTier:
        return await registry.create_tier(self.made())


class ChangeTier(AccountOperation):
    """Change the given properties of a tier."""

    model_config = with_example({"tier": _TIER, "limits": {"requests_per_minute": 120}})
    name = "tiers/change"

    tier: _TierName
    hotswapping: bool | None = None
    priority: bool | None = None
    trusted: bool | None = None
    gated: bool | None = None
    weight: _Weight | None = None
    limits: _Limits | None = None
    """All limits of the tier; an empty mapping restores the server's limits."""

    async def perform(self, registry: Registry) -> answers.AccountTier:
        changes = self.model_dump(exclude={"tier"}, exclude_none=True)
        if changes.get("limits") == {}:
            changes["limits"] = None
        return await registry.change_tier(self.tier, changes)


class DeleteTier(AccountOperation):
    """Delete a tier that no key has."""

    model_config = with_example({"tier": _TIER})
    name = "tiers/delete"

    tier: _TierName

    async def perform(self, registry: Registry) -> answers.DeletedTier:
        await registry.delete_tier(self.tier)
        return answers.DeletedTier(deleted=self.tier)


class AssignTier(AccountOperation):
    """Assign a tier to an API key."""

    model_config = with_example({"tier": _TIER, "key": _KEY})
    name = "tiers/assign"

    tier: _TierName
    key: _Text
    """Id of the key, or its beginning."""

    async def perform(self, registry: Registry) -> answers.ApiKey:
        return await registry.assign(self.tier, self.key)


class WithdrawTier(AccountOperation):
    """Withdraw a tier from an API key."""

    model_config = with_example({"tier": _TIER, "key": _KEY})
    name = "tiers/withdraw"

    tier: _TierName
    key: _Text
    """Id of the key, or its beginning."""

    async def perform(self, registry: Registry) -> answers.ApiKey:
        return await registry.withdraw(self.tier, self.key)


class ListUsers(AccountOperation):
    """All users."""

    name, method = "users", "GET"

    async def perform(self, registry: Registry) -> answers.AccountUsers:
        return answers.AccountUsers(users=await registry.users())


class ShowUser(AccountOperation):
    """One user, with the user's keys."""

    model_config = with_example({"user": _USER})
    name, method = "users/show", "GET"

    user: _User
    """Name of the user."""

    async def perform(self, registry: Registry) -> answers.UserWithKeys:
        return await registry.user(self.user)


ACCOUNT_OPERATIONS: tuple[type[AccountOperation], ...] = tuple(AccountOperation.__subclasses__())
"""All operations, in the order of this file."""

_NO_REGISTRY = (
    "This server has no database of API keys: NDIF_API_KEYS names a file, which you edit instead, or "
    "NDIF_DEV_MODE admits requests without a key."
)


async def perform_on(registry: Registry | None, operation: AccountOperation) -> Any:
    """Perform an operation and return its answer; raise an OperationError with an HTTP status."""
    if registry is None:
        raise OperationError(409, _NO_REGISTRY)
    try:
        return await operation.perform(registry)
    except NotInRegistryError as error:
        raise OperationError(404, str(error)) from error
    except (RegistryError, KeysError) as error:
        raise OperationError(409, str(error)) from error
