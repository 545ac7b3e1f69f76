"""The port of accounts: the sender of a request, and the sender's rights."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ndif.errors import NdifError
from ndif.hostname import client_network
from ndif.schema.account import (
    RIGHTS,
    AccountTier,
    AccountUser,
    ApiKey,
    ImportedKeys,
    NewApiKey,
    Tier,
    UserWithKeys,
)

_DIGEST = 16
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as known from its connection and its headers."""

    key: str = ""
    """API key as it was sent; empty without one."""
    address: str = ""
    """IP address; the client's own where a configured proxy names it."""
    uid: int | None = None
    """User id of the local process at the connection's other end; None if unknown."""

    @property
    def name(self) -> str:
        """Return the caller's name for fair scheduling without an account; a caller cannot choose it."""
        if self.uid is not None:
            return f"uid {self.uid}"
        return f"host {client_network(self.address)}" if self.address else ""


@dataclass(frozen=True, slots=True)
class Account:
    """The properties of a user that requests depend on."""

    user: str
    """Opaque name of the user in fair scheduling; not secret."""
    key: str = ""
    """Opaque digest of a verified API key, which does not reveal the key; empty without one."""
    email: str | None = None
    hotswapping: bool = False
    """Load models on demand for this user."""
    priority: bool = False
    """Serve this user's requests before others of their age."""
    trusted: bool = False
    """Run this user's code unconfined."""
    gated: bool = False
    """Load gated models on demand, which the hub gives to the operator's account but not to everybody."""
    weight: float = 1.0
    """Share of a model relative to other users."""
    limits: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Limits that differ from the server's, by name."""

    @property
    def tags(self) -> list[str]:
        """Return the names of the user's rights."""
        return [right for right in RIGHTS if getattr(self, right)]


def tier_with(
    rights: Collection[str],
    name: str,
    weight: float = 1.0,
    limits: Mapping[str, Any] | None = None,
) -> Tier:
    """Return a tier that gives these rights."""
    flags: dict[str, Any] = {right: right in rights for right in RIGHTS}
    return Tier(name=name, weight=weight, limits=limits, **flags)


class NoSuchKeyError(Exception):
    """The API key is missing, unknown or no longer valid; the message says what to do."""


class KeysError(NdifError):
    """The store of keys cannot be used; the message says why."""


class AccountsUnavailableError(Exception):
    """The database of keys does not answer; the message says why, for the log alone."""


class RegistryError(NdifError):
    """An operator's change to keys is impossible; the message says what to do."""


class NotInRegistryError(RegistryError):
    """There is no user, key or tier of that name."""


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """A key from another server; only its digest is known."""

    digest: str
    user: str | None
    tiers: Sequence[Tier] = ()
    name: str = ""


class Registry(Protocol):
    """The users, keys and tiers that operators read and change.

    Keys are named by their id or its beginning, users and tiers by their name. Each method makes all of its
    changes, or makes none and raises a `RegistryError`.
    """

    async def create_key(
        self,
        user: str | None,
        name: str = "",
        expires_at: float | None = None,
        tiers: Iterable[str] = (),
    ) -> NewApiKey:
        """Create a key; only this answer contains the key itself."""

    async def keys(self, user: str | None = None) -> list[ApiKey]:
        """Return all keys, or only the keys of a user, the oldest first."""

    async def key(self, given: str) -> ApiKey:
        """Return the key with this id, or with the only id that begins with `given`."""

    async def revoke(self, given: str) -> ApiKey:
        """Revoke a key; a key that is already revoked is not changed."""

    async def import_keys(self, keys: Iterable[ImportedKey]) -> ImportedKeys:
        """Add keys and the tiers that they name."""

    async def copy_foreign(self) -> ImportedKeys:
        """Copy the keys of another NDIF server's tables into this server's.

        The other tables are not changed, and are not read any more.
        """

    async def tiers(self) -> list[AccountTier]:
        """Return all tiers by name, each with the number of its keys."""

    async def create_tier(self, tier: Tier) -> AccountTier:
        """Add a tier."""

    async def change_tier(self, name: str, changes: Mapping[str, Any]) -> AccountTier:
        """Set some properties of a tier."""

    async def delete_tier(self, name: str) -> None:
        """Remove a tier that no key has."""

    async def assign(self, tier: str, key: str) -> ApiKey:
        """Give a key a tier; a key that has the tier is not changed."""

    async def withdraw(self, tier: str, key: str) -> ApiKey:
        """Take a tier from a key."""

    async def users(self) -> list[AccountUser]:
        """Return all users by name, each with the number of its keys."""

    async def user(self, name: str) -> UserWithKeys:
        """Return one user, and its keys."""


class Accounts(Protocol):
    """The users of a server."""

    @property
    def registry(self) -> Registry | None:
        """Return the registry of users, keys and tiers; None for a form that does not store them."""

    async def start(self) -> None:
        """Start background work."""

    async def stop(self) -> None:
        """Store pending changes, and close connections."""

    async def ping(self) -> None:
        """Raise an `AccountsUnavailableError` if the store of keys does not answer now."""

    async def account(self, caller: Caller) -> Account:
        """Return the account of a caller, or raise a `NoSuchKeyError` or an `AccountsUnavailableError`."""


def new_key() -> str:
    """Return a new random API key."""
    return f"ndif_{secrets.token_urlsafe(_KEY_BYTES)}"


def digest_of(key: str) -> str:
    """Return the digest by which an API key is stored and found."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def account_of(digest: str, user: str | None, tiers: Iterable[Tier]) -> Account:
    """Return the account of a key: every right of its tiers, the greatest weight, the widest limits."""
    tier_list = tuple(tiers)
    rights = {right: any(getattr(tier, right) for tier in tier_list) for right in RIGHTS}
    limits: dict[str, Any] = {}
    for tier in tier_list:
        for name, limit in (tier.limits or {}).items():
            has_none = None in (limit, limits.get(name, limit))
            limits[name] = None if has_none else max(limits.get(name, limit), limit)
    return Account(
        user=user or user_of(digest),
        key=runner_key_of(digest),
        email=user,
        **rights,
        weight=max((tier.weight for tier in tier_list), default=1.0),
        limits=limits,
    )


def user_of(digest: str) -> str:
    """Return the opaque user name of a key's holder in fair scheduling, given the key's digest."""
    return f"key {digest_of(digest)[:_DIGEST]}"


def runner_key_of(digest: str) -> str:
    """Return `Account.key` of the API key with this digest."""
    return digest_of(f"ndif runner {digest}")[: 2 * _DIGEST]


class WithoutStore:
    """The methods of `Accounts` that do nothing where accounts are not in a database."""

    @property
    def registry(self) -> None:
        return

    async def start(self) -> None:
        """See `Accounts.start`."""

    async def stop(self) -> None:
        """See `Accounts.stop`."""

    async def ping(self) -> None:
        """See `Accounts.ping`."""
