"""The port of accounts: who sends a request, and what its sender may do."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ndif.errors import NdifError

_DIGEST = 16
_SITE_BITS = 64
"""Bits of an IPv6 address that its holder did not choose."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sends a request, as far as its connection and its headers tell."""

    key: str = ""
    """API key as it was sent; empty without one."""
    address: str = ""
    """IP address; the client's own where a configured proxy names it."""
    uid: int | None = None
    """User of the process of this machine that has the connection's other end; None if not known."""

    @property
    def name(self) -> str:
        """Return the name under which the caller takes turns without an account; nobody can choose it."""
        if self.uid is not None:
            return f"uid {self.uid}"
        try:
            address = ipaddress.ip_address(self.address)
        except ValueError:
            return f"host {self.address}" if self.address else ""
        if address.version == 4 or address.is_loopback:
            return f"host {address}"
        return f"host {ipaddress.ip_network((address, _SITE_BITS), strict=False)}"


@dataclass(frozen=True, slots=True)
class Account:
    """One user's properties, as far as requests depend on them."""

    user: str
    """Opaque name under which the user's requests take turns; no secret."""
    key: str = ""
    """Opaque digest of a verified API key, which leads back to no key; empty where none was verified."""
    email: str | None = None
    hotswapping: bool = False
    """Load models on demand for this user."""
    priority: bool = False
    """Serve this user's requests before others of their age."""
    trusted: bool = False
    """Run this user's code unconfined."""
    weight: float = 1.0
    """Share of a model beside other users."""
    limits: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Limits that differ from the server's, by name."""

    @property
    def tags(self) -> list[str]:
        """Return the names of the user's privileges."""
        return [tag for tag in ("hotswapping", "priority") if getattr(self, tag)]


@dataclass(frozen=True, slots=True)
class Tier:
    """A name for what a key may do; a key may have several."""

    name: str
    hotswapping: bool = False
    priority: bool = False
    trusted: bool = False
    weight: float = 1.0
    limits: Mapping[str, Any] | None = field(default=None, hash=False)
    """Limits that differ from the server's, by name; None: none does."""


RIGHTS = ("hotswapping", "priority", "trusted")
"""Names of the rights that a tier gives."""


def tier_with(rights: Collection[str], name: str, weight: float = 1.0) -> Tier:
    """Return a tier that gives these rights."""
    return Tier(
        name,
        hotswapping="hotswapping" in rights,
        priority="priority" in rights,
        trusted="trusted" in rights,
        weight=weight,
    )


class NoSuchKeyError(Exception):
    """The API key is missing, unknown or no longer valid; the message says what to do."""


class KeysError(NdifError):
    """The store of keys cannot be used; the message says why."""


class AccountsAwayError(Exception):
    """The database of keys does not answer; the message says why, for the log alone."""


class Accounts(Protocol):
    """The users of a server."""

    async def start(self) -> None:
        """Begin to serve."""

    async def stop(self) -> None:
        """Store what is not stored yet, and let go of connections."""

    async def account(self, caller: Caller) -> Account:
        """Return the account of a caller; raise a `NoSuchKeyError` if there is none.

        Raise an `AccountsAwayError` if that cannot be told now.
        """


def digest_of(key: str) -> str:
    """Return the digest by which an API key is stored and found."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def account_of(digest: str, user: str | None, tiers: Iterable[Tier]) -> Account:
    """Return the account of a key: every right of its tiers, the greatest weight, the widest limits."""
    found = tuple(tiers)
    limits: dict[str, Any] = {}
    for tier in found:
        for name, limit in (tier.limits or {}).items():
            limits[name] = max(limits[name], limit) if name in limits else limit
    return Account(
        user=user or user_of(digest),
        key=runner_key_of(digest),
        email=user,
        hotswapping=any(tier.hotswapping for tier in found),
        priority=any(tier.priority for tier in found),
        trusted=any(tier.trusted for tier in found),
        weight=max((tier.weight for tier in found), default=1.0),
        limits=limits,
    )


def user_of(digest: str) -> str:
    """Return the opaque name under which the holder of a key takes turns, given the key's digest."""
    return f"key {digest_of(digest)[:_DIGEST]}"


def runner_key_of(digest: str) -> str:
    """Return `Account.key` of the API key with this digest."""
    return digest_of(f"ndif runner {digest}")[: 2 * _DIGEST]
