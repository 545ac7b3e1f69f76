"""The interface through which the gateway identifies users, and its form without keys."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Account:
    """One user's properties, as far as requests depend on them."""

    user: str
    """Opaque name under which the user's requests take turns; no secret."""
    key: str = ""
    """Opaque digest of a verified API key (see `digest_of`); empty where no key was verified."""
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


class Accounts(Protocol):
    """The users of a server."""

    async def account(self, key: str, host: str) -> Account:
        """Return the account of an API key, which may be empty, used from the machine `host`.

        Raises:
            NoSuchKeyError: if the server does not accept the key.
        """
        ...


class OpenAccounts:
    """The form of `Accounts` that needs no key: all users have the same privileges."""

    def __init__(self, *, hotswapping: bool, trusted: bool = False) -> None:
        self._hotswapping = hotswapping
        self._trusted = trusted

    async def account(self, key: str, host: str) -> Account:
        """See `Accounts.account`."""
        return Account(user_of(key, host), hotswapping=self._hotswapping, trusted=self._trusted)


def digest_of(secret: str) -> str:
    """Return a name for the holder of `secret`, a key or its hash, that leads back to neither."""
    return hashlib.sha256(f"ndif runner {secret}".encode()).hexdigest()[: 2 * _DIGEST]


def user_of(key: str, host: str) -> str:
    """Return the name of a user who takes turns: a digest of the key, or else the machine."""
    if key:
        return f"key {hashlib.sha256(key.encode()).hexdigest()[:_DIGEST]}"
    return f"host {host}" if host else ""
