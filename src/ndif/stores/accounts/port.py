"""The port of accounts: who sends a request, and what its sender may do."""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from typing import Protocol

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

    @property
    def tags(self) -> list[str]:
        """Return the names of the user's privileges."""
        return [tag for tag in ("hotswapping", "priority") if getattr(self, tag)]


class NoSuchKeyError(Exception):
    """The API key is missing or unknown; the message says what to do."""


class KeysError(NdifError):
    """The store of keys cannot be used; the message says why."""


class Accounts(Protocol):
    """The users of a server."""

    async def account(self, caller: Caller) -> Account:
        """Return the account of a caller; raise a `NoSuchKeyError` if there is none."""


def digest_of(key: str) -> str:
    """Return the digest by which an API key is stored and found."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def user_of(digest: str) -> str:
    """Return the opaque name under which the holder of a key takes turns, given the key's digest."""
    return f"key {digest_of(digest)[:_DIGEST]}"


def runner_key_of(digest: str) -> str:
    """Return `Account.key` of the API key with this digest."""
    return digest_of(f"ndif runner {digest}")[: 2 * _DIGEST]
